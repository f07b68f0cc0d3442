"""Rotary embeddings as the flags of a language model describe them."""

from __future__ import annotations

from typing import Any

from megatron.core.config.errors import ConfigError
from megatron.core.fusions.rope import apply_rotary as apply_rotary
from megatron.core.transformer.rope import MultimodalRotaryEmbedding as MultimodalRotaryEmbedding
from megatron.core.transformer.rope import (
    RopeScaling,
    yarn_mscale,
)
from megatron.core.transformer.rope import RotaryEmbedding as RotaryEmbedding
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig


def build_rotary(
    config: TransformerConfig, max_sequence_length: int, **of_rotary: Any
) -> RotaryEmbedding:
    """Build the rotary embedding of --position-embedding-type rope from ``of_rotary``."""
    is_latent = config.multi_latent_attention
    scaling: RopeScaling | None = None
    if isinstance(config, MLATransformerConfig):
        of_rotary |= {"rotary_base": config.rotary_base, "rotary_percent": config.rotary_percent}
    if config.rope_type == "yarn" or (is_latent and config.rope_type is None):
        scaling = _yarn(config, max_sequence_length)
    elif not is_latent:
        scaling = _longrope(config, max_sequence_length)
    return RotaryEmbedding(
        config.qk_pos_emb_head_dim if is_latent else config.kv_channels,
        rotary_interleaved=config.rotary_interleaved or is_latent,
        scaling=scaling,
        window_base=config.window_rotary_base,
        **of_rotary,
    )


def build_multimodal_rotary(config: TransformerConfig, **of_rotary: Any) -> RotaryEmbedding:
    """Build the rotary embedding of --position-embedding-type mrope from ``of_rotary``.

    Raises ConfigError unless --mrope-section fits the width of a head.
    """
    interleaved = config.rotary_interleaved
    rotary = MultimodalRotaryEmbedding(
        config.kv_channels, rotary_interleaved=interleaved, **of_rotary
    )
    if problem := wrong_sections(config.mrope_section, rotary.width // 2):
        raise ConfigError(problem)
    return rotary


def wrong_sections(sections: tuple[int, ...] | None, num_pairs: int) -> str | None:
    """Return what is wrong with --mrope-section for heads that rotate ``num_pairs``, or None."""
    if sections is None or len(sections) != 3:
        given = "is not given" if sections is None else f"has {len(sections)} numbers"
        return (
            f"--position-embedding-type mrope: --mrope-section {given}; give the pairs of channels "
            "that rotate by time, height and width"
        )
    if sum(sections) != num_pairs:
        shown = " ".join(map(str, sections))
        return (
            f"--mrope-section {shown} are {sum(sections)} pairs of channels and a head rotates "
            f"{num_pairs}: their sum is half of --kv-channels times --rotary-percent"
        )
    return None


def _yarn(c: TransformerConfig, max_sequence_length: int) -> RopeScaling:
    """Return YaRN scaling: the default with latent attention, otherwise with --rope-type yarn."""
    factor = c.rotary_scaling_factor
    ratio = yarn_mscale(factor, c.mscale) / yarn_mscale(factor, c.mscale_all_dim)
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_max_positions=c.yarn_original_max_position_embeddings or max_sequence_length,
        beta_fast=32.0 if c.yarn_beta_fast is None else c.yarn_beta_fast,
        beta_slow=1.0 if c.yarn_beta_slow is None else c.yarn_beta_slow,
        round_correction_range=c.yarn_correction_range_round_to_int,
        attention_factor=ratio,
    )


def _longrope(config: TransformerConfig, max_sequence_length: int) -> RopeScaling | None:
    """Return LongRoPE scaling if the config has its factors, else None."""
    short, long = config.longrope_short_factor, config.longrope_long_factor
    original = config.longrope_original_max_position_embeddings
    if short is None and long is None:
        return None
    if short is None or long is None or original is None:
        raise ConfigError(
            "LongRoPE needs --longrope-short-factor, --longrope-long-factor and "
            "--longrope-original-max-position-embeddings together"
        )
    return RopeScaling(
        kind="longrope",
        factor=max_sequence_length / original,
        original_max_positions=original,
        short_factors=short,
        long_factors=long,
    )
