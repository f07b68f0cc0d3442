"""Heads, windows, softmax and rotary details of attention."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config import states
from megatron.core.config.option import option
from megatron.core.config.parse import int_pair, layer_pattern, member_of
from megatron.core.enums import AttnBackend


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Heads, windows, softmax and rotary details of attention."""

    num_attention_heads: int = option(
        0,
        "Query heads of each attention layer.",
        group="network size",
        default=None,
    )
    attention_backend: AttnBackend = option(
        AttnBackend.auto,
        "Implementation of the attention core: flash, fused, unfused (plain), local (plain,"
        " of the local layers) or auto.",
        group="network size",
        choices=tuple(AttnBackend),
        parse=member_of(AttnBackend),
    )
    kv_channels: int = option(
        None,
        "Width of one attention head; the hidden size over the number of heads if not given.",
        group="network size",
    )
    num_query_groups: int = option(
        None,
        "Key and value heads with --group-query-attention; 1 is multi-query attention.",
        group="network size",
        default=1,
    )
    relative_attention_num_buckets: int = option(
        32,
        "Buckets of distances with --position-embedding-type relative.",
        group="network size",
    )
    relative_attention_max_distance: int = option(
        128,
        "Distance in tokens from which relative positions share a bucket.",
        group="network size",
    )
    rotary_interleaved: bool = option(
        False,
        "Rotate neighbouring pairs of channels instead of the two halves of a head.",
        group="network size",
    )
    no_rope_freq: int | tuple[int, ...] | None = option(
        None,
        "Layers without rotation: every Nth, or a list such as ([0]*3+[1])*2 where 1 skips it.",
        group="network size",
        parse=layer_pattern,
    )
    mrope_section: tuple[int, ...] | None = option(
        None,
        "Channels of a head for time, height and width positions.",
        group="network size",
        nargs="+",
        refused=states.MULTIMODAL,
    )
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
    softmax_scale: float | None = option(
        None,
        "Factor on the attention scores; one over the root of the head width if not given.",
        group="network size",
    )
    softmax_type: str = option(
        "vanilla",
        "Softmax of attention: vanilla, or with a sink, a further score without a value: 0 "
        "(off-by-one) or a parameter of each head (learnable).",
        group="network size",
        choices=("vanilla", "off-by-one", "learnable"),
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
    yarn_original_max_position_embeddings: int | None = option(
        None,
        "YaRN: tokens of the context that the model was first trained with; "
        "--max-position-embeddings if not given.",
        group="network size",
    )
    yarn_beta_fast: float | None = option(
        None,
        "YaRN: pairs that turn more often than this in the original context are kept; 32 if not "
        "given.",
        group="network size",
    )
    yarn_beta_slow: float | None = option(
        None,
        "YaRN: pairs that turn less often are divided by the factor; 1 if not given.",
        group="network size",
    )
    yarn_correction_range_round_to_int: bool = option(
        True,
        "YaRN: do not round the pairs between which the factor grows to whole ones.",
        group="network size",
    )
    attention_dropout: float = option(
        0.1,
        "Probability of dropping an attention weight.",
        group="regularization",
    )
    rope_type: str | None = option(
        None,
        "Kind of rotation: rope, or yarn, which stretches the context by --rotary-scaling-factor; "
        "latent attention has yarn if not given.",
        group="training",
        choices=("rope", "yarn"),
    )
    use_flash_attn: bool = option(
        False,
        "Old spelling of --attention-backend flash.",
        group="training",
    )
    add_qkv_bias: bool = option(
        False,
        "Keep the bias of the query, key and value projection under --disable-bias-linear.",
        group="training",
    )
    apply_query_key_layer_scaling: bool = option(
        False,
        "Divide attention scores by the layer number before the softmax and multiply inside"
        " it, against overflow in fp16.",
        group="mixed precision",
    )
    attention_softmax_in_fp32: bool = option(
        False,
        "Compute the attention softmax in fp32.",
        group="mixed precision",
    )
    qk_layernorm: bool = option(
        False,
        "Normalise queries and keys of each head before attention.",
        group="vision",
    )
    qk_l2_norm: bool = option(
        False,
        "Divide queries and keys of each head by their root mean square.",
        group="vision",
    )
    flash_decode: bool = option(
        False,
        "Use flash decoding while generating.",
        group="inference",
        refused="flash decoding is not in this version; drop the flag: generation attends "
        "through --attention-backend",
    )
