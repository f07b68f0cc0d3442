"""Checks of encoder-decoder models (T5)."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.training.config.run import RunConfig
from megatron.training.models.registry import model_kind_of

_EVEN_STAGES = (
    "encoder and decoder each split their layers evenly; use "
    "--encoder-pipeline-model-parallel-size to set how many stages are the encoder's"
)
_NO_FEATURE = "the T5 model does not have this feature; use pretrain_gpt.py for it"
_ONE_STACK = "a list has an entry for each layer of one stack; give a number, for every Nth layer"
_NO_DOCUMENTS = "a T5 sample comes from one document; use pretrain_gpt.py for packed documents"


def halves_have_stages_of_their_own(run: RunConfig) -> Iterator[str]:
    """Require separate, non-empty pipeline stages for encoder and decoder."""
    m, pp = run.model, run.model.pipeline_model_parallel_size
    if not model_kind_of(run).has_encoder or pp <= 1:
        return
    first = m.encoder_pipeline_model_parallel_size
    if not 0 < first < pp:
        yield (
            f"--pipeline-model-parallel-size {pp}: T5 has separate stages for encoder and "
            "decoder, and "
            f"--encoder-pipeline-model-parallel-size is {first}: use 1 to {pp - 1}"
        )
        return
    depths = m.num_layers, run.language_model.decoder_num_layers or 0
    for flag, depth, stages in zip(
        ("--encoder-num-layers", "--decoder-num-layers"), depths, (first, pp - first), strict=True
    ):
        if depth < stages:
            yield (
                f"{flag} {depth} layers cannot be split over {stages} pipeline stages: change "
                "--encoder-pipeline-model-parallel-size or use fewer stages"
            )


def encoder_decoder_is_asked_what_it_has(run: RunConfig) -> Iterator[str]:
    """Refuse features that T5 does not have.

    For other models refuse the relative position bias, which only T5 has.
    """
    m, lm, d = run.model, run.language_model, run.data
    if not model_kind_of(run).has_encoder:
        if lm.position_embedding_type == "relative":
            yield (
                "--position-embedding-type relative: only T5 has the relative position bias; use "
                "rope, or pretrain_t5.py"
            )
        return
    for flag, is_on, why in (
        (
            "virtual pipeline stages", m.virtual_pipeline_model_parallel_size is not None,
            "a rank has one stage; for a smaller pipeline bubble use --pipeline-schedule zb-h1",
        ),
        ("--pipeline-model-parallel-layout", m.pipeline_model_parallel_layout, _EVEN_STAGES),
        ("--pipeline-split auto", m.pipeline_split == "auto", _EVEN_STAGES),
        (
            "--decoder-first-pipeline-num-layers", m.decoder_first_pipeline_num_layers,
            _EVEN_STAGES,
        ),
        ("--decoder-last-pipeline-num-layers", m.decoder_last_pipeline_num_layers, _EVEN_STAGES),
        (
            "--account-for-embedding-in-pipeline-split",
            m.account_for_embedding_in_pipeline_split, _EVEN_STAGES,
        ),
        (
            "--account-for-loss-in-pipeline-split", m.account_for_loss_in_pipeline_split,
            _EVEN_STAGES,
        ),
        (
            "--ckpt-format torch", m.pipeline_model_parallel_size > 1 and run.checkpoint.save
            and run.checkpoint.ckpt_format == "torch",
            "it cannot store encoder stages; use torch_dist or safetensors_dist",
        ),
        (f"--num-experts {m.num_moe_experts}", m.num_moe_experts, _NO_FEATURE),
        ("--multi-latent-attention", m.multi_latent_attention, _NO_FEATURE),
        (f"--mtp-num-layers {m.mtp_num_layers}", m.mtp_num_layers, _NO_FEATURE),
        ("--heterogeneous-layers-config-path", m.heterogeneous_layers_config_path, _NO_FEATURE),
        ("--spec", lm.spec and lm.spec[0] != "local", _NO_FEATURE),
        (
            f"--layer-norm-placement {m.layer_norm_placement}", m.layer_norm_placement != "pre",
            "T5 normalises before attention and MLP (pre); use pretrain_gpt.py for other "
            "placements",
        ),
        ("--qk-layernorm", m.qk_layernorm, _NO_FEATURE),
        ("--qk-l2-norm", m.qk_l2_norm, _NO_FEATURE),
        ("--no-rope-freq", isinstance(m.no_rope_freq, tuple), _ONE_STACK),
        (
            "--window-attn-skip-freq", isinstance(m.window_attn_skip_freq, tuple),
            _ONE_STACK,
        ),
        (
            "--position-embedding-type alibi", lm.position_embedding_type == "alibi",
            "T5 does not support it; use relative, learned_absolute, rope or none",
        ),
        ("--reset-attention-mask", d.reset_attention_mask, _NO_DOCUMENTS),
        ("--reset-position-ids", d.reset_position_ids, _NO_DOCUMENTS),
        ("--eod-mask-loss", d.eod_mask_loss, _NO_DOCUMENTS),
    ):  # fmt: skip
        if is_on:
            yield f"{flag} with T5: {why}"


def both_sequences_fit_sequence_parallel(run: RunConfig) -> Iterator[str]:
    """Require a decoder length that sequence parallelism can split."""
    length, m = run.data.decoder_seq_length or 0, run.model
    tp = m.tensor_model_parallel_size
    if model_kind_of(run).has_encoder and m.sequence_parallel and tp > 0 and length % tp:
        yield (
            f"--decoder-seq-length {length} is not a multiple of --tensor-model-parallel-size "
            f"{tp}, as --sequence-parallel needs: use a multiple of {tp}"
        )


def distances_fill_their_buckets(run: RunConfig) -> Iterator[str]:
    """Require enough buckets for near distances, and a larger maximum distance.

    Each direction has one bucket for each near distance, and shared buckets for far distances.
    """
    m = run.model
    if run.language_model.position_embedding_type != "relative":
        return
    buckets, farthest = m.relative_attention_num_buckets, m.relative_attention_max_distance
    if buckets < 4:
        yield f"--relative-attention-num-buckets {buckets}: use 4 or more"
    elif farthest <= buckets // 2:
        yield (
            f"--relative-attention-max-distance {farthest}: it must exceed the {buckets // 2} "
            "buckets of small distances; raise it or lower --relative-attention-num-buckets"
        )
