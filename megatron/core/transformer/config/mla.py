"""Latent attention."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config import states
from megatron.core.config.option import option


@dataclass(frozen=True, kw_only=True)
class MLAConfig:
    """Latent attention."""

    q_lora_rank: int | None = option(
        None,
        "Width of the latent vector of queries; none means no compression.",
        group="mla",
        ignored=states.only_with("--multi-latent-attention"),
    )
    kv_lora_rank: int = option(
        32,
        "Width of the latent vector of keys and values.",
        group="mla",
        ignored=states.only_with("--multi-latent-attention"),
    )
    qk_head_dim: int = option(
        128,
        "Width of a head's part of queries and keys that is not rotated.",
        group="mla",
        ignored=states.only_with("--multi-latent-attention"),
    )
    qk_pos_emb_head_dim: int = option(
        64,
        "Width of a head's rotated part of queries and keys.",
        group="mla",
        ignored=states.only_with("--multi-latent-attention"),
    )
    v_head_dim: int = option(
        128,
        "Width of a head's values.",
        group="mla",
        ignored=states.only_with("--multi-latent-attention"),
    )
    rotary_scaling_factor: float = option(
        1.0,
        "Factor by which YaRN stretches the context.",
        group="mla",
        ignored=states.only_with("--multi-latent-attention"),
    )
    mscale: float = option(
        1.0,
        "Factor of YaRN's attention temperature on rotated channels.",
        group="mla",
        ignored=states.only_with("--multi-latent-attention"),
    )
    mscale_all_dim: float = option(
        0.0,
        "Factor of YaRN's attention temperature on all channels.",
        group="mla",
        ignored=states.only_with("--multi-latent-attention"),
    )
    cache_mla_latents: bool = option(
        False,
        "Keep latent vectors instead of keys and values while generating.",
        group="mla",
        ignored=states.only_with("--multi-latent-attention"),
    )
