"""Rotary embeddings as the flags of a language model describe them."""

from __future__ import annotations

from typing import Any

from megatron.core.config.errors import ConfigError
from megatron.core.fusions.rope import apply_rotary as apply_rotary
from megatron.core.transformer.rope import MultimodalRotaryEmbedding as MultimodalRotaryEmbedding
from megatron.core.transformer.rope import RotaryEmbedding as RotaryEmbedding
from megatron.core.transformer.rope import build_rotary as build_rotary
from megatron.core.transformer.transformer_config import TransformerConfig


def build_multimodal_rotary(config: TransformerConfig, **of_rotary: Any) -> RotaryEmbedding:
    """Build the rotary embedding of --position-embedding-type mrope from ``of_rotary``.

    Raises ConfigError unless --mrope-section fits the width of a head.
    """
    interleaved = config.rotary_interleaved
    rotary = MultimodalRotaryEmbedding(
        config.kv_channels, rotary_interleaved=interleaved, **of_rotary
    )
    rotary.has_mixed_sections = config.mrope_interleaved
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
