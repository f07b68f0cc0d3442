"""Heads, windows, softmax and rotary details of attention."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config.option import option
from megatron.core.config.parse import int_pair, layer_pattern, member_of
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
    window_size: tuple[int, int] | None = option(
        None,
        "Sliding window: keys a query sees to its left and to its right, as LEFT,RIGHT; "
        "-1 means no limit.",
        group="network size",
        parse=int_pair,
    )
    window_attn_skip_freq: int | tuple[int, ...] | None = option(
        None,
        "Which layers have the sliding window: N leaves every Nth layer full, a list such as "
        "[1,1,0]*4 marks windowed layers by 1 and full ones by 0.",
        group="network size",
        parse=layer_pattern,
    )
    attn_logit_softcapping: float | None = option(
        None,
        "Squash the attention logits smoothly into plus or minus this value.",
        group="network size",
    )
    qk_layernorm_full_width: bool = option(
        False,
        "Normalise queries and keys over all heads at once instead of head by head.",
        group="network size",
    )
    longrope_short_factor: tuple[float, ...] | None = option(
        None,
        "LongRoPE: divisor of each rotary frequency for sequences up to the original length.",
        group="network size",
        nargs="+",
    )
    longrope_long_factor: tuple[float, ...] | None = option(
        None,
        "LongRoPE: divisor of each rotary frequency for longer sequences.",
        group="network size",
        nargs="+",
    )
    longrope_original_max_position_embeddings: int | None = option(
        None,
        "LongRoPE: tokens of the context that the model was first trained with.",
        group="network size",
    )
    attention_dropout: float = option(0.1, "", group="regularization")
    rope_type: str | None = option(None, "", group="training", choices=("rope", "yarn"))
    use_flash_attn: bool = option(False, "", group="training")
    add_qkv_bias: bool = option(False, "", group="training")
    apply_query_key_layer_scaling: bool = option(False, "", group="mixed precision")
    attention_softmax_in_fp32: bool = option(False, "", group="mixed precision")
    qk_layernorm: bool = option(False, "", group="vision")
    qk_l2_norm: bool = option(False, "", group="vision")
    flash_decode: bool = option(False, "", group="inference")
