"""Latent attention."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from megatron.core.config.option import option

_mla = partial(option, group="mla")


@dataclass(frozen=True, kw_only=True)
class MLAConfig:
    """Latent attention."""

    q_lora_rank: int | None = _mla(
        None, "Width of the latent vector of queries; none means no compression."
    )
    kv_lora_rank: int = _mla(32, "Width of the latent vector of keys and values.")
    qk_head_dim: int = _mla(128, "Width of a head's part of queries and keys that is not rotated.")
    qk_pos_emb_head_dim: int = _mla(64, "Width of a head's rotated part of queries and keys.")
    v_head_dim: int = _mla(128, "Width of a head's values.")
    rotary_scaling_factor: float = _mla(
        1.0, "Factor by which YaRN stretches the context.", at_least=1
    )
    mscale: float = _mla(1.0, "Factor of YaRN's attention temperature on rotated channels.")
    mscale_all_dim: float = _mla(0.0, "Factor of YaRN's attention temperature on all channels.")
    cache_mla_latents: bool = _mla(
        False, "Keep latent vectors instead of keys and values while generating."
    )
