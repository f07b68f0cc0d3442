"""Heads, windows, softmax and rotary details of attention."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from megatron.core.config import flag_messages
from megatron.core.config.option import option
from megatron.core.config.parse import int_pair, layer_pattern, member_of
from megatron.core.enums import AttnBackend

_network = partial(option, group="network size")
_training = partial(option, group="training")


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Heads, windows, softmax and rotary details of attention."""

    num_attention_heads: int = _network(
        0, "Query heads of each attention layer.", default=None, at_least=1
    )
    attention_backend: AttnBackend = _network(
        AttnBackend.auto,
        "Implementation of the attention core: flash, fused, unfused (plain), local (plain,"
        " of the local layers) or auto.",
        choices=tuple(AttnBackend),
        parse=member_of(AttnBackend),
    )
    kv_channels: int = _network(
        None,
        "Width of one attention head; the hidden size over the number of heads if not given.",
        at_least=1,
    )
    num_query_groups: int = _network(
        None,
        "Key and value heads with --group-query-attention; 1 is multi-query attention.",
        default=1,
    )
    relative_attention_num_buckets: int = _network(
        32, "Buckets of distances with --position-embedding-type relative."
    )
    relative_attention_max_distance: int = _network(
        128, "Distance in tokens from which relative positions share a bucket."
    )
    rotary_interleaved: bool = _network(
        False, "Rotate neighbouring pairs of channels instead of the two halves of a head."
    )
    no_rope_freq: int | tuple[int, ...] | None = _network(
        None,
        "Layers without rotation: every Nth, or a list such as ([0]*3+[1])*2 where 1 skips it.",
        parse=layer_pattern,
    )
    mrope_section: tuple[int, ...] | None = _network(
        None,
        "Channels of a head for time, height and width positions.",
        nargs="+",
        refused=flag_messages.MULTIMODAL,
    )
    window_size: tuple[int, int] | None = _network(
        None,
        "Sliding window: keys a query sees to its left and to its right, as LEFT,RIGHT; "
        "-1 means no limit.",
        parse=int_pair,
    )
    window_attn_skip_freq: int | tuple[int, ...] | None = _network(
        None,
        "Which layers have the sliding window: N leaves every Nth layer full, a list such as "
        "[1,1,0]*4 marks windowed layers by 1 and full ones by 0.",
        parse=layer_pattern,
    )
    attn_logit_softcapping: float | None = _network(
        None, "Squash the attention logits smoothly into plus or minus this value."
    )
    softmax_scale: float | None = _network(
        None, "Factor on the attention scores; one over the root of the head width if not given."
    )
    softmax_type: str = _network(
        "vanilla",
        "Softmax of attention: vanilla, or with a sink, a further score without a value: 0 "
        "(off-by-one) or a parameter of each head (learnable).",
        choices=("vanilla", "off-by-one", "learnable"),
    )
    qk_layernorm_full_width: bool = _network(
        False, "Normalise queries and keys over all heads at once instead of head by head."
    )
    longrope_short_factor: tuple[float, ...] | None = _network(
        None,
        "LongRoPE: divisor of each rotary frequency for sequences up to the original length.",
        nargs="+",
    )
    longrope_long_factor: tuple[float, ...] | None = _network(
        None, "LongRoPE: divisor of each rotary frequency for longer sequences.", nargs="+"
    )
    longrope_original_max_position_embeddings: int | None = _network(
        None, "LongRoPE: tokens of the context that the model was first trained with."
    )
    yarn_original_max_position_embeddings: int | None = _network(
        None,
        "YaRN: tokens of the context that the model was first trained with; "
        "--max-position-embeddings if not given.",
        at_least=1,
    )
    yarn_beta_fast: float | None = _network(
        None,
        "YaRN: pairs that turn more often than this in the original context are kept; 32 if not "
        "given.",
    )
    yarn_beta_slow: float | None = _network(
        None, "YaRN: pairs that turn less often are divided by the factor; 1 if not given."
    )
    yarn_correction_range_round_to_int: bool = _network(
        True, "YaRN: do not round the pairs between which the factor grows to whole ones."
    )
    attention_dropout: float = option(
        0.1, "Probability of dropping an attention weight.", group="regularization"
    )
    rope_type: str | None = _training(
        None,
        "Kind of rotation: rope, or yarn, which stretches the context by --rotary-scaling-factor; "
        "latent attention has yarn if not given.",
        choices=("rope", "yarn"),
    )
    use_flash_attn: bool = _training(False, "Old spelling of --attention-backend flash.")
    add_qkv_bias: bool = _training(
        False, "Keep the bias of the query, key and value projection under --disable-bias-linear."
    )
    apply_query_key_layer_scaling: bool = option(
        False,
        "Divide attention scores by the layer number before the softmax and multiply inside"
        " it, against overflow in fp16.",
        group="mixed precision",
    )
    attention_softmax_in_fp32: bool = option(
        False, "Compute the attention softmax in fp32.", group="mixed precision"
    )
    qk_layernorm: bool = option(
        False, "Normalise queries and keys of each head before attention.", group="vision"
    )
    qk_l2_norm: bool = option(
        False, "Divide queries and keys of each head by their root mean square.", group="vision"
    )
    flash_decode: bool = option(
        False,
        "Use flash decoding while generating.",
        group="inference",
        refused="flash decoding is not available in this program; use --attention-backend, which "
        "also chooses the kernel of generation",
    )
