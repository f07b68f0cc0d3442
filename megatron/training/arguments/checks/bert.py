"""Rules about BERT."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.training.config.run import RunConfig

_NO_PART = "BERT has no such part; use pretrain_gpt.py for a model that has it"
_NO_DOCUMENTS = "a sample of BERT has one document; use pretrain_gpt.py for packed documents"


def bert_is_asked_what_it_has(run: RunConfig) -> Iterator[str]:
    """What BERT has no part or no place for."""
    m, lm, d = run.model, run.language_model, run.data
    if lm.model_kind != "bert":
        return
    cp, kind = m.context_parallel_size, lm.position_embedding_type
    for flag, is_on, why in (
        (f"--context-parallel-size {cp}", cp > 1, "sequences are not divided, use 1"),
        (
            f"--position-embedding-type {kind}",
            kind not in ("learned_absolute", "rope", "none"),
            "use learned_absolute, rope or none",
        ),
        ("--num-experts", m.num_moe_experts, _NO_PART),
        ("--multi-latent-attention", m.multi_latent_attention, _NO_PART),
        ("--mtp-num-layers", m.mtp_num_layers, _NO_PART),
        ("--heterogeneous-layers-config-path", m.heterogeneous_layers_config_path, _NO_PART),
        ("--spec", lm.spec and lm.spec[0] != "local", "its layers are its own, drop the flag"),
        ("--use-rope-scaling", lm.use_rope_scaling, "drop the flag"),
        ("--reset-attention-mask", d.reset_attention_mask, _NO_DOCUMENTS),
        ("--reset-position-ids", d.reset_position_ids, _NO_DOCUMENTS),
        ("--eod-mask-loss", d.eod_mask_loss, _NO_DOCUMENTS),
    ):
        if is_on:
            yield f"{flag} with BERT: {why}"


def shares_of_masked_data_are_shares(run: RunConfig) -> Iterator[str]:
    """Something is hidden, and something is not."""
    hidden, short = run.data.mask_prob, run.data.short_seq_prob
    if not 0 < hidden < 1:
        yield f"--mask-prob {hidden}: more than 0 and less than 1 is needed"
    if not 0 <= short <= 1:
        yield f"--short-seq-prob {short}: a share from 0 to 1 is needed"
