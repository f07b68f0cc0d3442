"""Heads, windows, softmax and rotary details of attention."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config.option import option
from megatron.core.config.parse import layer_pattern, member_of
from megatron.core.enums import AttnBackend


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Heads, windows, softmax and rotary details of attention."""

    num_attention_heads: int = option(0, "", group="network size", default=None)
    attention_backend: AttnBackend = option(
        AttnBackend.auto,
        "",
        group="network size",
        choices=tuple(AttnBackend),
        parse=member_of(AttnBackend),
    )
    kv_channels: int = option(None, "", group="network size")
    num_query_groups: int = option(None, "", group="network size", default=1)
    relative_attention_num_buckets: int = option(32, "", group="network size")
    relative_attention_max_distance: int = option(128, "", group="network size")
    rotary_interleaved: bool = option(False, "", group="network size")
    no_rope_freq: int | tuple[int, ...] | None = option(
        None,
        "",
        group="network size",
        parse=layer_pattern,
    )
    mrope_section: tuple[int, ...] | None = option(None, "", group="network size", nargs="+")
    attention_dropout: float = option(0.1, "", group="regularization")
    rope_type: str | None = option(None, "", group="training", choices=("rope", "yarn"))
    use_flash_attn: bool = option(False, "", group="training")
    add_qkv_bias: bool = option(False, "", group="training")
    apply_query_key_layer_scaling: bool = option(False, "", group="mixed precision")
    attention_softmax_in_fp32: bool = option(False, "", group="mixed precision")
    qk_layernorm: bool = option(False, "", group="vision")
    qk_l2_norm: bool = option(False, "", group="vision")
    flash_decode: bool = option(False, "", group="inference")
