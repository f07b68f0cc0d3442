"""Checks of --batch-invariant-mode."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.training.config.run import RunConfig

_ORDER = "has no kernel that sums in a fixed order"
_BATCH = "depends on all tokens of a batch"
_SAMPLES = "changes the log-probabilities at random"


def tokens_depend_on_their_sequence_alone(run: RunConfig) -> Iterator[str]:
    """Refuse --batch-invariant-mode with options that it cannot compute in a fixed order."""
    m = run.model
    if not m.batch_invariant_mode:
        return
    balancing = m.moe_router_load_balancing_type
    for flag, is_on, reason, fix in (
        (f"--attention-dropout {m.attention_dropout}", m.attention_dropout > 0, _SAMPLES, "use 0"),
        (f"--hidden-dropout {m.hidden_dropout}", m.hidden_dropout > 0, _SAMPLES, "use 0"),
        ("--fp16", m.fp16, _ORDER, "use --bf16 or fp32"),
        (f"--{m.format_flag}", m.is_quantized, _BATCH, "leave it out"),
        (f"--compile {m.compile}", m.compile != "none", "replaces its kernels", "use none"),
        (
            f"--context-parallel-size {m.context_parallel_size}",
            m.context_parallel_size > 1,
            _ORDER,
            "use 1",
        ),
        ("--cache-mla-latents", m.cache_mla_latents, "generates in another order", "leave it out"),
        (
            f"--position-embedding-type {run.language_model.position_embedding_type}",
            run.language_model.position_embedding_type in ("alibi", "relative"),
            _ORDER,
            "use rope or learned_absolute",
        ),
        ("--reset-attention-mask", run.data.reset_attention_mask, _ORDER, "leave it out"),
        (
            f"--loss-chunk-size {m.loss_chunk_size}",
            bool(m.loss_chunk_size),
            "computes logits in another order",
            "use 0",
        ),
        (
            "--moe-expert-capacity-factor",
            m.moe_expert_capacity_factor is not None,
            _BATCH,
            "leave it out",
        ),
        ("--moe-input-jitter-eps", bool(m.moe_input_jitter_eps), _SAMPLES, "leave it out"),
        (
            "--moe-router-load-balancing-type sinkhorn",
            balancing == ("sinkhorn",),
            _BATCH,
            "use aux_loss",
        ),
        (
            "--moe-router-force-load-balancing",
            m.moe_router_force_load_balancing,
            _BATCH,
            "leave it out",
        ),
    ):
        if is_on:
            yield f"--batch-invariant-mode: {flag} {reason}; {fix}"
