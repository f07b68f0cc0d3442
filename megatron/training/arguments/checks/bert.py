"""Checks of BERT models."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.training.config.run import RunConfig
from megatron.training.models.registry import model_kind_of

_NO_FEATURE = "the BERT model does not have this feature; use pretrain_gpt.py for it"
_NO_DOCUMENTS = "a BERT sample comes from one document; use pretrain_gpt.py for packed documents"


def bert_is_asked_what_it_has(run: RunConfig) -> Iterator[str]:
    """Refuse features that BERT does not have."""
    m, lm, d = run.model, run.language_model, run.data
    if not model_kind_of(run).has_masked_lm_head:
        return
    kind = lm.position_embedding_type
    for flag, is_on, why in (
        (
            f"--position-embedding-type {kind}",
            kind not in ("learned_absolute", "rope", "none"),
            "BERT does not support it; use learned_absolute, rope or none",
        ),
        (f"--num-experts {m.num_moe_experts}", m.num_moe_experts, _NO_FEATURE),
        ("--multi-latent-attention", m.multi_latent_attention, _NO_FEATURE),
        (f"--mtp-num-layers {m.mtp_num_layers}", m.mtp_num_layers, _NO_FEATURE),
        ("--heterogeneous-layers-config-path", m.heterogeneous_layers_config_path, _NO_FEATURE),
        (
            f"--spec {' '.join(lm.spec or ())}",
            lm.spec and lm.spec[0] != "local",
            "BERT builds its own layers; use pretrain_gpt.py for layers from a spec",
        ),
        (
            "--use-rope-scaling",
            lm.use_rope_scaling,
            "BERT does not support Llama's scaling; use --rotary-seq-len-interpolation-factor",
        ),
        ("--reset-attention-mask", d.reset_attention_mask, _NO_DOCUMENTS),
        ("--reset-position-ids", d.reset_position_ids, _NO_DOCUMENTS),
        ("--eod-mask-loss", d.eod_mask_loss, _NO_DOCUMENTS),
    ):
        if is_on:
            yield f"{flag} with BERT: {why}"


def shares_of_masked_data_are_shares(run: RunConfig) -> Iterator[str]:
    """Require valid probabilities for masking and for short sequences."""
    hidden, short = run.data.mask_prob, run.data.short_seq_prob
    if not 0 < hidden < 1:
        yield f"--mask-prob {hidden}: use a share greater than 0 and less than 1"
    if not 0 <= short <= 1:
        yield f"--short-seq-prob {short}: use a share from 0 to 1"
