"""Latent attention."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config.option import option


@dataclass(frozen=True, kw_only=True)
class MLAConfig:
    """Latent attention."""

    q_lora_rank: int | None = option(None, "", group="mla")
    kv_lora_rank: int = option(32, "", group="mla")
    qk_head_dim: int = option(128, "", group="mla")
    qk_pos_emb_head_dim: int = option(64, "", group="mla")
    v_head_dim: int = option(128, "", group="mla")
    rotary_scaling_factor: float = option(1.0, "", group="mla")
    mscale: float = option(1.0, "", group="mla")
    mscale_all_dim: float = option(0.0, "", group="mla")
    cache_mla_latents: bool = option(False, "", group="mla")
