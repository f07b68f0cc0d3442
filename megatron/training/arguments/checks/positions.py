"""Checks of position embeddings."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.models.common.positions import wrong_sections
from megatron.training.config.run import RunConfig
from megatron.training.models.registry import model_kind_of


def table_is_long_enough(run: RunConfig) -> Iterator[str]:
    """Require a learned position for every token of a sample.

    Rotary embeddings and ALiBi have no table.
    """
    lm, d = run.language_model, run.data
    longest = max(d.seq_length, d.decoder_seq_length or 0)
    if model_kind_of(run).classifies_images:  # positions beyond the table are padding
        return
    if model_kind_of(run).reads_images:  # its positions count an image as one token
        longest = (run.vision.dataloader_seq_length or 0) + 1
    table = lm.max_position_embeddings
    if lm.position_embedding_type == "learned_absolute" and table and table < longest:
        yield (
            f"--max-position-embeddings {table} is less than the {longest} tokens of a sample "
            "(--seq-length): raise it or shorten the samples"
        )


def dropping_positions_is_said_by_type(run: RunConfig) -> Iterator[str]:
    """Refuse --no-position-embedding with a position embedding other than rope.

    It means that there is no learned table beside rotary embeddings.
    """
    kind = run.language_model.position_embedding_type
    if not run.asked["add_position_embedding"] and kind not in ("rope", "none"):
        yield (
            f"--no-position-embedding contradicts --position-embedding-type {kind}: use "
            "--position-embedding-type none"
        )


def mrope_is_complete(run: RunConfig) -> Iterator[str]:
    """Require --mrope-section to divide a head's channels, and a model that supports M-RoPE."""
    lm = run.language_model
    m = run.model
    kind = model_kind_of(run)
    if lm.position_embedding_type != "mrope":
        return
    if kind.has_encoder or kind.has_masked_lm_head or kind.is_hybrid:
        yield (
            f"--position-embedding-type mrope with --model-kind {lm.model_kind}: only GPT and "
            "models that read images support it; use rope"
        )
    num_pairs = int((m.kv_channels or 0) * lm.rotary_percent) // 2
    if problem := wrong_sections(m.mrope_section, num_pairs):
        yield problem


def rotated_width_is_even(run: RunConfig) -> Iterator[str]:
    """Require an even number of rotary channels, as channels rotate in pairs."""
    lm, width = run.language_model, run.model.kv_channels or 0
    if lm.position_embedding_type not in ("rope", "mrope"):
        return
    if not 0 < lm.rotary_percent <= 1:
        yield f"--rotary-percent {lm.rotary_percent}: more than 0 and at most 1 is needed"
    elif int(width * lm.rotary_percent) % 2:
        yield (
            f"--rotary-percent {lm.rotary_percent} of a head {width} wide is an odd number of "
            "channels: change --rotary-percent or --kv-channels"
        )


def one_rotary_scaling(run: RunConfig) -> Iterator[str]:
    """Refuse several methods that scale the rotary frequencies."""
    lm, m = run.language_model, run.model
    chosen = [
        flag
        for flag, on in (
            ("--use-rope-scaling", lm.use_rope_scaling),
            ("--rotary-seq-len-interpolation-factor", lm.rotary_seq_len_interpolation_factor),
            ("--longrope-short-factor", m.longrope_short_factor),
            ("--rope-type yarn", m.rope_type == "yarn"),
        )
        if on
    ]
    if len(chosen) > 1:
        yield f"{' and '.join(chosen)} exclude each other: keep the model's scaling"


def yarn_stretches(run: RunConfig) -> Iterator[str]:
    """Require --yarn-beta-fast > --yarn-beta-slow > 0.

    YaRN interpolates between pairs of channels with fast and with slow rotation.
    """
    m = run.model
    fast, slow = m.yarn_beta_fast, m.yarn_beta_slow
    fast, slow = 32.0 if fast is None else fast, 1.0 if slow is None else slow
    if not fast > slow > 0:
        yield f"--yarn-beta-fast {fast} and --yarn-beta-slow {slow}: make the first the larger one"


def longrope_is_complete(run: RunConfig) -> Iterator[str]:
    """Require both LongRoPE lists, one factor per channel pair, and the original length."""
    m, lm = run.model, run.language_model
    parts = {
        "--longrope-short-factor": m.longrope_short_factor,
        "--longrope-long-factor": m.longrope_long_factor,
        "--longrope-original-max-position-embeddings": (
            m.longrope_original_max_position_embeddings
        ),
    }
    if all(value is None for value in parts.values()):
        return
    missing = [flag for flag, value in parts.items() if value is None]
    if missing:
        yield f"LongRoPE also needs {' and '.join(missing)}"
    if lm.position_embedding_type != "rope":
        yield (
            f"LongRoPE scales rotations and --position-embedding-type is "
            f"{lm.position_embedding_type}: use rope"
        )
    pairs = int((m.kv_channels or 0) * lm.rotary_percent) // 2
    for flag in ("--longrope-short-factor", "--longrope-long-factor"):
        factors = parts[flag]
        if isinstance(factors, tuple) and len(factors) != pairs:
            yield f"{flag} has {len(factors)} numbers and a head rotates {pairs} pairs of channels"


def latent_attention_has_its_own_rotation(run: RunConfig) -> Iterator[str]:
    """Refuse options that multi-latent attention does not support.

    It rotates only a part of each head, in pairs of neighbouring channels.
    """
    m, lm = run.model, run.language_model
    if not m.multi_latent_attention:
        return
    if lm.position_embedding_type not in ("rope", "none", "learned_absolute"):
        yield (
            f"--multi-latent-attention with --position-embedding-type {lm.position_embedding_type}"
            ": it rotates a part of each head itself; use rope or none, or learned_absolute to add "
            "a learned table"
        )
    if m.rotary_interleaved:
        yield (
            "--rotary-interleaved and --multi-latent-attention exclude each other: use "
            "--multi-latent-attention alone, which always rotates neighbouring channels"
        )
    if run.asked["group_query_attention"]:
        yield (
            "--group-query-attention and --multi-latent-attention exclude each other: keep the "
            "first to share key and value heads, the second to compress them to a latent vector"
        )
    if m.qk_pos_emb_head_dim % 2:
        yield (
            f"--qk-pos-emb-head-dim {m.qk_pos_emb_head_dim} is odd: channels rotate in pairs; use "
            "an even number"
        )
    if m.v_head_dim > m.qk_head_dim + m.qk_pos_emb_head_dim:
        yield (
            f"--v-head-dim {m.v_head_dim} is greater than --qk-head-dim plus "
            "--qk-pos-emb-head-dim, "
            f"{m.qk_head_dim + m.qk_pos_emb_head_dim}: lower it"
        )
