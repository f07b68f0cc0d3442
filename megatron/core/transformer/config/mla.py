"""Options of multi-latent attention (MLA)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from megatron.core.config.option import option

_mla = partial(option, group="mla")


@dataclass(frozen=True, kw_only=True)
class MLAConfig:
    """Options of multi-latent attention (MLA)."""

    q_lora_rank: int | None = _mla(
        None, "Rank of the latent queries in MLA; no compression if not given."
    )
    kv_lora_rank: int = _mla(32, "Rank of the latent keys and values in MLA.")
    qk_head_dim: int = _mla(
        128, "Dimension of the part of each query and key head that is not rotated, in MLA."
    )
    qk_pos_emb_head_dim: int = _mla(
        64, "Dimension of the rotated part of each query and key head in MLA; even."
    )
    v_head_dim: int = _mla(128, "Dimension of each value head in MLA.")
    rotary_scaling_factor: float = _mla(1.0, "Context extension factor of YaRN.", at_least=1)
    mscale: float = _mla(1.0, "YaRN attention scaling of rotated channels.")
    mscale_all_dim: float = _mla(0.0, "YaRN attention scaling of all channels.")
    cache_mla_latents: bool = _mla(
        False, "Cache latent vectors instead of keys and values during generation."
    )
