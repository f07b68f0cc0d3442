"""Attention options: heads, windows, softmax, rotary embedding and latent attention (MLA)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from megatron.core.config.option import option
from megatron.core.config.parse import int_pair, layer_frequency, member_of
from megatron.core.enums import AttnBackend

KDA = "kda"
LINEAR_VARIANTS = ("gated_delta_net", "gdn", KDA)
SPARSE_VARIANT = "dsa"
_network = partial(option, group="network size")
_training = partial(option, group="training")


@dataclass(kw_only=True)
class AttentionConfig:
    """Attention options: heads, windows, softmax and rotary embedding."""

    num_attention_heads: int = _network(
        0, "Number of attention (query) heads per layer.", default=None, at_least=1
    )
    attention_backend: AttnBackend = _network(
        AttnBackend.auto,
        "Attention kernel: flash, fused, unfused, local (plain PyTorch of the local layers) "
        "or auto.",
        choices=tuple(AttnBackend),
        parse=member_of(AttnBackend),
    )
    kv_channels: int = _network(
        None,
        "Dimension of each attention head; --hidden-size / --num-attention-heads if not given.",
        at_least=1,
    )
    num_query_groups: int = _network(
        None,
        "Number of key/value heads with --group-query-attention; 1 is multi-query attention.",
        default=1,
    )
    relative_attention_num_buckets: int = _network(
        32, "Number of distance buckets with --position-embedding-type relative."
    )
    relative_attention_max_distance: int = _network(
        128, "Distance in tokens beyond which relative positions share a bucket."
    )
    rotary_interleaved: bool = _network(
        False,
        "Rotate adjacent channel pairs instead of the two halves of a head; excludes "
        "--multi-latent-attention.",
    )
    no_rope_freq: int | tuple[int, ...] | None = _network(
        None,
        "Layers without rotary embedding: every Nth, or a list such as ([0]*3+[1])*2 where 1 "
        "disables it.",
        parse=layer_frequency,
    )
    mrope_section: tuple[int, ...] | None = _network(
        None,
        "Pairs of a head's channels that rotate by time, height and width with "
        "--position-embedding-type mrope; their sum is half of --kv-channels.",
        nargs="+",
        at_least=0,
    )
    mrope_interleaved: bool = _network(
        False,
        "Let time, height and width of --mrope-section take turns from pair to pair (Qwen3-VL), in "
        "place of consecutive sections.",
    )
    window_size: tuple[int, int] | None = _network(
        None,
        "Sliding window attention: number of keys to the left and right of each query, as "
        "LEFT,RIGHT; -1 is unlimited.",
        parse=int_pair,
    )
    window_attn_skip_freq: int | tuple[int, ...] | None = _network(
        None,
        "Layers with the sliding window: N keeps full attention in every Nth layer; in a "
        "list such as [1,1,0]*4, 1 is windowed and 0 is full.",
        parse=layer_frequency,
    )
    window_rotary_base: float | None = _network(
        None,
        "Base of the rotary embedding in layers with a sliding window, which --rotary-base and "
        "scaling of positions then do not reach; --rotary-base if not given.",
    )
    attn_logit_softcapping: float | None = _network(
        None, "Soft-cap attention logits to plus or minus this value (tanh)."
    )
    softmax_scale: float | None = _network(
        None, "Scale of the attention scores; 1/sqrt(head dimension) if not given."
    )
    softmax_type: str = _network(
        "vanilla",
        "Attention softmax: vanilla, off-by-one (with a sink logit of 0) or learnable (with "
        "a learned sink logit per head).",
        choices=("vanilla", "off-by-one", "learnable"),
    )
    qk_layernorm_full_width: bool = _network(
        False, "Apply --qk-layernorm over all heads at once instead of per head."
    )
    qk_layernorm_after_rope: bool = _network(
        False,
        "Apply --qk-layernorm after the rotary embedding instead of before it; excludes "
        "--multi-latent-attention.",
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
        None, "LongRoPE: context length in tokens before extension."
    )
    yarn_original_max_position_embeddings: int | None = _network(
        None,
        "YaRN: context length in tokens before extension; --max-position-embeddings if not given.",
        at_least=1,
    )
    yarn_beta_fast: float | None = _network(
        None,
        "YaRN: channels that rotate more often than this over the original context keep "
        "their frequency; 32 if not given.",
    )
    yarn_beta_slow: float | None = _network(
        None,
        "YaRN: channels that rotate less often than this over the original context are fully "
        "interpolated; 1 if not given.",
    )
    yarn_query_scaling_beta: float | None = _network(
        None,
        "YaRN: multiply the query at position p by 1 + beta * ln(1 + floor(p / original context "
        "length)); queries are not scaled if not given.",
    )
    yarn_correction_range_round_to_int: bool = _network(
        True, "YaRN: do not round the channel range of the interpolation ramp to integers."
    )
    attention_output_gate: bool = _network(
        False,
        "Multiply the output of softmax attention by the sigmoid of a gate per channel, which the "
        "QKV projection computes too; excludes --multi-latent-attention.",
    )
    experimental_attention_variant: str | None = _network(
        None,
        "gated_delta_net, or gdn for short: linear attention by the gated delta rule in the layers "
        "that --linear-attention-freq selects. kda: Kimi Delta Attention in them, with a decay "
        "per key channel instead of one per head, and as many key as value heads. dsa: DeepSeek "
        "Sparse Attention in all layers, in which a query of latent attention attends to the "
        "--dsa-indexer-topk keys that an indexer selects.",
        choices=(*LINEAR_VARIANTS, SPARSE_VARIANT),
    )
    linear_attention_freq: int | tuple[int, ...] | None = _network(
        None,
        "Layers with linear attention (--experimental-attention-variant): N keeps softmax "
        "attention in every Nth layer; in a list such as ([1]*3+[0])*2, 1 is linear. All layers "
        "if not given.",
        parse=layer_frequency,
    )
    linear_conv_kernel_dim: int = _network(
        4, "Width in tokens of the short convolution of linear attention.", at_least=1
    )
    linear_key_head_dim: int = _network(
        128, "Dimension of each query and key head of linear attention.", at_least=1
    )
    linear_value_head_dim: int = _network(
        128, "Dimension of each value head of linear attention.", at_least=1
    )
    linear_num_key_heads: int = _network(
        16, "Number of query and key heads of linear attention.", at_least=1
    )
    linear_num_value_heads: int = _network(
        32,
        "Number of value heads of linear attention, a multiple of --linear-num-key-heads.",
        at_least=1,
    )
    linear_norm_epsilon: float | None = _network(
        None,
        "Epsilon of the norm of the output of linear attention; --norm-epsilon if not given.",
    )
    linear_allow_neg_eigval: bool = _network(
        False,
        "Double the strength of corrections of linear attention, to at most 2, so that a state may "
        "change its sign along a key.",
    )
    attention_dropout: float = option(
        0.1, "Dropout probability of attention weights.", group="regularization"
    )
    rope_type: str | None = _training(
        None,
        "Rotary embedding: rope, or yarn, which extends the context by "
        "--rotary-scaling-factor; yarn for --multi-latent-attention if not given.",
        choices=("rope", "yarn"),
    )
    use_flash_attn: bool = _training(False, "Alias of --attention-backend flash.")
    add_qkv_bias: bool = _training(
        False, "Add a bias to the QKV projection even with --disable-bias-linear."
    )
    apply_query_key_layer_scaling: bool = option(
        False,
        "Divide attention scores by the layer number before the softmax and multiply inside "
        "it, against fp16 overflow.",
        group="mixed precision",
    )
    attention_softmax_in_fp32: bool = option(
        True,
        "Compute the attention softmax in fp32.",
        group="mixed precision",
        default=False,
    )
    qk_layernorm: bool = option(
        False,
        "Normalize the queries and keys of each head, with learned weights; --qk-l2-norm replaces "
        "it.",
        group="vision",
    )
    qk_l2_norm: bool = option(
        False,
        "Divide the queries and keys of each head by their root mean square, without learned "
        "weights; replaces --qk-layernorm, excludes --multi-latent-attention.",
        aliases=("--export-qk-l2-norm",),
        group="vision",
    )
    qk_clip: bool = _network(
        False,
        "After each step, scale the query and key weights of self-attention heads whose largest "
        "logit of the step exceeded --qk-clip-threshold, so that it would equal the threshold. "
        "Costs one more product of queries and keys per layer and forward pass.",
    )
    qk_clip_alpha: float = _network(
        0.5,
        "Power of --qk-clip's factor by which query weights are scaled; key weights by 1 minus it.",
    )
    qk_clip_threshold: float = _network(100.0, "Largest attention logit that --qk-clip permits.")
    flash_decode: bool = option(
        False,
        "Use flash decoding during generation.",
        group="inference",
        ignored="generation chooses its attention kernel itself",
    )


_mla = partial(option, group="mla")


@dataclass(kw_only=True)
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
    mla_latent_norm_epsilon: float | None = _mla(
        None, "Epsilon of the norms of latent vectors in MLA; --norm-epsilon if not given."
    )


@dataclass(kw_only=True)
class SparseAttentionConfig:
    """Options of DeepSeek Sparse Attention (--experimental-attention-variant dsa)."""

    dsa_indexer_n_heads: int = _network(
        64, "Number of heads of the indexer of sparse attention.", at_least=1
    )
    dsa_indexer_head_dim: int = _network(
        128,
        "Dimension of each head of the indexer of sparse attention, of which the first "
        "--qk-pos-emb-head-dim channels are rotated.",
        at_least=1,
    )
    dsa_indexer_topk: int = _network(
        2048, "Number of keys that each query of sparse attention attends to.", at_least=1
    )
    dsa_indexer_loss_coeff: float = _network(
        0.0,
        "Coefficient of the indexer's loss, the divergence of its scores from the attention "
        "probabilities. With 0 its parameters are frozen.",
    )
    dsa_indexer_use_sparse_loss: bool = _network(
        False, "Compute the indexer's loss over the selected keys, not over all visible keys."
    )
    dsa_indexer_k_norm_epsilon: float | None = _network(
        None, "Epsilon of the norm of the indexer's keys; --norm-epsilon if not given."
    )
    dsa_indexer_k_norm_fp32: bool = _network(
        False,
        "Compute the norm of the indexer's keys in fp32.",
        ignored="norms compute in fp32 for any dtype of their input",
    )
    dsa_indexer_rope_interleaved: bool = _network(
        False, "Rotate adjacent channel pairs of the indexer instead of two halves, as GLM-5 does."
    )
    dsa_indexer_rotate_activation: bool = _network(
        True,
        "Do not rotate the indexer's queries and keys by a Hadamard matrix.",
        ignored="this rotation changes no product of queries and keys, which are not quantized",
    )
    dsa_indexer_scoring_relu: bool = _network(
        True,
        "Add the indexer's products of queries and keys without a ReLU before the sum over heads.",
    )
    dsa_indexer_topk_freq: int = _network(
        1,
        "Layers per indexer: after the first --dsa-indexer-skip-topk-offset layers, one of N "
        "layers selects keys for itself and the layers up to the next one.",
        at_least=1,
    )
    dsa_indexer_skip_topk_offset: int = _network(
        0, "Number of the last layer before the pattern of --dsa-indexer-topk-freq starts."
    )
    dsa_kernel_backend: str = _network(
        "none",
        "Kernels of sparse attention: none selects keys by a mask of the usual kernels.",
        choices=("none", "tilelang", "cudnn"),
        refused_values={
            name: "this program has no such kernel of sparse attention: use none"
            for name in ("tilelang", "cudnn")
        },
    )
