"""Checks of Mamba and hybrid models."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.ssm.mamba_hybrid_layer_allocation import (
    EXPERTS,
    MAMBA,
    pattern_problems,
)
from megatron.core.ssm.mixer_shape import mixer_problems, mixer_shape
from megatron.training.arguments.hybrid_pattern import hybrid_pattern
from megatron.training.config.run import RunConfig
from megatron.training.models.registry import model_kind_of


def hybrid_pattern_fits_the_layers(run: RunConfig) -> Iterator[str]:
    """Require one letter per layer, or ratios that add up to at most 1."""
    lm = run.language_model
    if model_kind_of(run).is_hybrid and run.model.num_layers:
        asked = lm.hybrid_attention_ratio, lm.hybrid_mlp_ratio, lm.hybrid_override_pattern
        yield from pattern_problems(run.model.num_layers, *asked)


def mamba_sizes_fit(run: RunConfig) -> Iterator[str]:
    """Require heads, groups and widths of the mixer that tensor parallelism can split."""
    if MAMBA in hybrid_pattern(run) and run.model.hidden_size:
        problems = list(mixer_problems(run.model))
        yield from problems
        m = run.model
        rows = sum(mixer_shape(m).projected) // m.tensor_model_parallel_size
        if m.fp8 is not None and not problems and rows % 16:
            yield (
                f"--fp8-format {m.fp8}: the input projection of a Mamba layer has {rows} rows on "
                "each tensor-parallel rank, not a multiple of 16; change --mamba-num-heads or "
                "--mamba-state-dim"
            )


def hybrid_pattern_names_the_layers_of_experts(run: RunConfig) -> Iterator[str]:
    """Require MoE layers (E) in the pattern if and only if there are experts."""
    m = run.model
    pattern = hybrid_pattern(run)
    if not pattern:
        return
    has_letter = EXPERTS in pattern
    if has_letter and m.num_moe_experts is None:
        yield f"--hybrid-override-pattern {pattern} has MoE layers, E: add --num-experts"
    if m.num_moe_experts is not None and not has_letter:
        yield (
            f"--num-experts {m.num_moe_experts}: no layer of the pattern {pattern} has experts; "
            "give "
            "--hybrid-override-pattern with an E for each MoE layer"
        )
    freq = run.asked["moe_layer_freq"]
    # Checkpoints in Megatron-LM's formats have the list that was derived from the pattern.
    is_derived = isinstance(freq, list | tuple) and tuple(freq) == m.moe_layer_freq
    if freq != 1 and not is_derived:
        yield (
            f"--moe-layer-freq {freq} is not available for hybrid models: "
            "put an E into --hybrid-override-pattern for each MoE layer"
        )


def mamba_layers_can_do_what_is_asked(run: RunConfig) -> Iterator[str]:
    """Refuse features that Mamba layers do not have."""
    m = run.model
    if not model_kind_of(run).is_hybrid:
        if m.is_hybrid_model:
            yield (
                "--is-hybrid-model: this program does not train hybrid models; use "
                "pretrain_mamba.py (--model-kind mamba)"
            )
        return
    for flag, is_asked, cure in (
        (
            f"--mtp-num-layers {m.mtp_num_layers}",
            m.mtp_num_layers is not None,
            "use pretrain_gpt.py for multi-token prediction",
        ),
        (
            f"--layer-norm-placement {m.layer_norm_placement}",
            m.layer_norm_placement != "pre",
            "a Mamba layer normalises before its mixer (pre); use pretrain_gpt.py for other "
            "placements",
        ),
        (
            "--heterogeneous-layers-config-path",
            m.heterogeneous_layers_config_path is not None,
            "use --hybrid-override-pattern to choose the layers",
        ),
        (
            "--recompute-granularity adaptive",
            m.recompute_granularity == "adaptive",
            "use full, or selective",
        ),
        (
            "--reset-attention-mask",
            run.data.reset_attention_mask,
            "a Mamba layer carries its state across the end of a document; use pretrain_gpt.py to "
            "separate documents",
        ),
    ):
        if is_asked:
            yield f"{flag} is not available for Mamba and hybrid models: {cure}"
