"""Latent attention."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config.option import option


@dataclass(frozen=True, kw_only=True)
class MLAConfig:
    """Latent attention."""

    q_lora_rank: int | None = option(
        None,
        "Width of the latent vector of queries; none means no compression.",
        group="mla",
    )
    kv_lora_rank: int = option(
        32,
        "Width of the latent vector of keys and values.",
        group="mla",
    )
    qk_head_dim: int = option(
        128,
        "Width of a head's part of queries and keys that is not rotated.",
        group="mla",
    )
    qk_pos_emb_head_dim: int = option(
        64,
        "Width of a head's rotated part of queries and keys.",
        group="mla",
    )
    v_head_dim: int = option(
        128,
        "Width of a head's values.",
        group="mla",
    )
    rotary_scaling_factor: float = option(
        1.0,
        "Factor by which YaRN stretches the context.",
        group="mla",
    )
    mscale: float = option(
        1.0,
        "Factor of YaRN's attention temperature on rotated channels.",
        group="mla",
    )
    mscale_all_dim: float = option(
        0.0,
        "Factor of YaRN's attention temperature on all channels.",
        group="mla",
    )
    cache_mla_latents: bool = option(
        False,
        "Keep latent vectors instead of keys and values while generating.",
        group="mla",
    )
