"""Rules about a model of two halves: T5."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.training.config.run import RunConfig

_DEALT_OUT = "layers are dealt out evenly to the stages of each half, drop the flag"
_NO_PART = "T5 has no such part; use pretrain_gpt.py for a model that has it"
_ONE_STACK = "a list names layers of one stack, drop the flag"
_NO_DOCUMENTS = "a sample of T5 has one document; use pretrain_gpt.py for packed documents"


def halves_have_stages_of_their_own(run: RunConfig) -> Iterator[str]:
    """A stage holds layers of one half, and at least one."""
    m, pp = run.model, run.model.pipeline_model_parallel_size
    if run.language_model.model_kind != "t5" or pp <= 1:
        return
    first = m.encoder_pipeline_model_parallel_size
    if not 0 < first < pp:
        yield (
            f"--pipeline-model-parallel-size {pp}: some stages of T5 hold the encoder and some the "
            f"decoder, and --encoder-pipeline-model-parallel-size is {first}: give 1 to {pp - 1}"
        )
        return
    depths = m.num_layers, run.language_model.decoder_num_layers or 0
    for flag, depth, stages in zip(
        ("--encoder-num-layers", "--decoder-num-layers"), depths, (first, pp - first), strict=True
    ):
        if depth < stages:
            yield (
                f"{flag} {depth} layers cannot be dealt out to {stages} pipeline stages: change "
                "--encoder-pipeline-model-parallel-size or use fewer stages"
            )


def encoder_decoder_is_asked_what_it_has(run: RunConfig) -> Iterator[str]:
    """What T5 has no part or no place for; elsewhere, what T5 alone has."""
    m, lm, d = run.model, run.language_model, run.data
    if lm.model_kind != "t5":
        if lm.position_embedding_type == "relative":
            yield (
                "--position-embedding-type relative: T5 alone has such a bias, use "
                "pretrain_t5.py, or alibi"
            )
        return
    for flag, is_on, why in (
        (
            f"--context-parallel-size {m.context_parallel_size}", m.context_parallel_size > 1,
            "attention to the encoder's output needs all of it, use 1",
        ),
        (
            "virtual pipeline stages", m.virtual_pipeline_model_parallel_size is not None,
            "a rank has one stage, drop the flags that make more",
        ),
        ("--pipeline-model-parallel-layout", m.pipeline_model_parallel_layout, _DEALT_OUT),
        ("--pipeline-split auto", m.pipeline_split == "auto", _DEALT_OUT),
        (
            "--decoder-first-pipeline-num-layers", m.decoder_first_pipeline_num_layers, _DEALT_OUT,
        ),
        ("--decoder-last-pipeline-num-layers", m.decoder_last_pipeline_num_layers, _DEALT_OUT),
        (
            "--account-for-embedding-in-pipeline-split",
            m.account_for_embedding_in_pipeline_split, _DEALT_OUT,
        ),
        (
            "--account-for-loss-in-pipeline-split", m.account_for_loss_in_pipeline_split,
            _DEALT_OUT,
        ),
        (
            "--ckpt-format torch", m.pipeline_model_parallel_size > 1 and run.checkpoint.save
            and run.checkpoint.ckpt_format == "torch",
            "it has no files for stages of an encoder, use torch_dist or safetensors_dist",
        ),
        ("--num-experts", m.num_moe_experts, _NO_PART),
        ("--multi-latent-attention", m.multi_latent_attention, _NO_PART),
        ("--mtp-num-layers", m.mtp_num_layers, _NO_PART),
        ("--heterogeneous-layers-config-path", m.heterogeneous_layers_config_path, _NO_PART),
        ("--spec", lm.spec and lm.spec[0] != "local", _NO_PART),
        (
            "--layer-norm-placement", m.layer_norm_placement != "pre",
            "its norms stand in front of each part, drop the flag",
        ),
        ("--qk-layernorm", m.qk_layernorm, _NO_PART),
        ("--qk-l2-norm", m.qk_l2_norm, _NO_PART),
        ("--no-rope-freq", isinstance(m.no_rope_freq, tuple), _ONE_STACK),
        (
            "--window-attn-skip-freq", isinstance(m.window_attn_skip_freq, tuple),
            _ONE_STACK,
        ),
        (
            "--position-embedding-type alibi", lm.position_embedding_type == "alibi",
            "use relative, learned_absolute, rope or none",
        ),
        ("--reset-attention-mask", d.reset_attention_mask, _NO_DOCUMENTS),
        ("--reset-position-ids", d.reset_position_ids, _NO_DOCUMENTS),
        ("--eod-mask-loss", d.eod_mask_loss, _NO_DOCUMENTS),
    ):  # fmt: skip
        if is_on:
            yield f"{flag} with T5: {why}"


def both_sequences_fit_sequence_parallel(run: RunConfig) -> Iterator[str]:
    """The decoder's sequence is cut as the encoder's is."""
    length, m = run.data.decoder_seq_length or 0, run.model
    tp = m.tensor_model_parallel_size
    if run.language_model.model_kind == "t5" and m.sequence_parallel and tp > 0 and length % tp:
        yield (
            f"--decoder-seq-length {length} is not a multiple of --tensor-model-parallel-size "
            f"{tp}, as --sequence-parallel needs: change one of them or drop --sequence-parallel"
        )


def distances_fill_their_buckets(run: RunConfig) -> Iterator[str]:
    """Each side has near distances with buckets of their own, and far ones behind them."""
    m = run.model
    if run.language_model.position_embedding_type != "relative":
        return
    buckets, farthest = m.relative_attention_num_buckets, m.relative_attention_max_distance
    if buckets < 4:
        yield f"--relative-attention-num-buckets {buckets}: at least 4 are needed"
    elif farthest <= buckets // 2:
        yield (
            f"--relative-attention-max-distance {farthest}: {buckets // 2} buckets hold near "
            "distances alone, give more than that or fewer --relative-attention-num-buckets"
        )
