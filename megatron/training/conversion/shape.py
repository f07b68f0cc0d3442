"""Description of what a model computes, independent of flags, to compare two models.

Several flags can express the same model (`--swiglu` or an activation, a window for all layers or a
list of layers).  `ModelShape` has one form for each, so that equal models have equal shapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields

import torch.nn.functional as F

from megatron.core.activations import openai_gelu, quick_gelu, squared_relu
from megatron.core.ssm.mamba_hybrid_layer_allocation import layer_pattern
from megatron.core.transformer.attention import layer_has_rope
from megatron.core.transformer.attention_masks import window_of_layer
from megatron.core.transformer.config.attention import KDA, LINEAR_VARIANTS, SPARSE_VARIANT
from megatron.core.transformer.heterogeneous.heterogeneous_config import layer_shapes
from megatron.core.transformer.layer_layout import has_experts, has_linear_attention
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.checkpointing.checkpoint_args import EXPERTS, LATENT, LINEAR, SPARSE, YARN
from megatron.training.config.run import RunConfig
from megatron.training.models.registry import model_kind, model_kind_of

ENDLESS = 2048  # max_position_embeddings of models without a longest sequence
# Symbols of a hybrid's layers -> values that only they use; set to these if it has no such layers.
_READ_BY: dict[str, dict[str, object]] = {
    "*": {
        **{"num_attention_heads": 1, "num_query_groups": 1, "kv_channels": 1, "softmax_scale": 1.0},
        **{"add_qkv_bias": False, "qk_norm": None},
    },
    "-": {"ffn_hidden_size": 1},
    "-E": {"activation": "silu", "is_gated": True},
    "*-E": {"add_bias_linear": False},
}
# Values that only some models use; `__post_init__` sets them to their defaults in all others.
_READ_BY_SOME: tuple[tuple[Callable[[ModelShape], object], Iterable[str]], ...] = (
    (lambda shape: shape.num_experts is not None, (*EXPERTS, "expert_layers")),
    (lambda shape: shape.mtp_num_layers, ("mtp_hybrid_override_pattern",)),
    (lambda shape: shape.multi_latent_attention, LATENT),
    (
        lambda shape: shape.position_embedding_type in ("rope", "mrope"),
        (
            *("rotary_base", "rotary_percent", "rotary_interleaved"),
            *("rotary_seq_len_interpolation_factor", "without_rope"),
        ),
    ),
    (
        lambda shape: shape.position_embedding_type == "mrope",
        ("mrope_section", "mrope_interleaved"),
    ),
    (
        lambda shape: shape.position_embedding_type == "rope" and any(shape.windows),
        ("window_rotary_base",),
    ),
    (
        lambda shape: shape.position_embedding_type == "rope",
        (
            *("rope_scaling_factor", "longrope_short_factor", "longrope_long_factor"),
            *("longrope_original_max_position_embeddings", *YARN),
        ),
    ),
    (lambda shape: shape.rotary_scaling_factor != 1, YARN),
    (
        lambda shape: shape.position_embedding_type == "relative",
        ("relative_attention_num_buckets", "relative_attention_max_distance"),
    ),
    (lambda shape: model_kind(shape.kind).has_encoder, ("decoder_num_layers",)),
    (lambda shape: model_kind(shape.kind).has_masked_lm_head, ("has_binary_head",)),
    (
        lambda shape: model_kind(shape.kind).is_hybrid,
        ("mamba_state_dim", "mamba_head_dim", "mamba_num_groups", "mamba_num_heads"),
    ),
    (
        lambda shape: any(shape.linear_layers),
        ("linear_layers", "linear_norm_epsilon", "linear_allow_neg_eigval", *LINEAR),
    ),
    (lambda shape: shape.attention_variant == SPARSE_VARIANT, SPARSE),
    (
        lambda shape: shape.enable_mhc_connections,
        ("mhc_num_residual_streams", "mhc_sinkhorn_iterations"),
    ),
)


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Description of a model.  Sizes are global; names are those of our flags where one exists."""

    kind: str = "gpt"  # or bert, t5, mamba
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    max_position_embeddings: int
    vocab_size: int  # rows of the embedding that are tokens
    normalization: str = "RMSNorm"
    norm_epsilon: float = 1e-5
    apply_layernorm_1p: bool = False
    layer_norm_placement: str = "pre"
    apply_residual_connection_post_layernorm: bool = False
    activation: str = "silu"  # or gelu, gelu_tanh, relu, squared_relu, quick_gelu
    is_gated: bool = True
    add_bias_linear: bool = False
    add_qkv_bias: bool = False
    position_embedding_type: str = "rope"
    rotary_base: float = 10000
    rotary_percent: float = 1.0
    rotary_interleaved: bool = False
    mrope_section: tuple[int, ...] | None = None
    mrope_interleaved: bool = False
    rope_scaling_factor: float | None = None  # of Llama 3's scaling
    rotary_seq_len_interpolation_factor: float | None = None
    longrope_short_factor: tuple[float, ...] | None = None
    longrope_long_factor: tuple[float, ...] | None = None
    longrope_original_max_position_embeddings: int | None = None
    window_rotary_base: float | None = None  # in layers with a window, if it is another one
    without_rope: tuple[bool, ...] = ()  # per layer: whether it does not rotate; (): all rotate
    windows: tuple[int | None, ...] = ()  # per layer: number of earlier tokens it attends to
    qk_norm: str | None = None  # head: per head; wide: over all heads; latent: of MLA
    qk_layernorm_after_rope: bool = False
    softmax_scale: float = 0.0
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    residual_scale: float = 1.0
    enable_mhc_connections: bool = False
    mhc_num_residual_streams: int = 4
    mhc_sinkhorn_iterations: int = 20
    embedding_scale: float = 1.0
    output_scale: float = 1.0  # of the output layer's input
    is_tied: bool = False
    is_reward: bool = False  # one score in place of the output layer
    num_experts: int | None = None
    expert_layers: tuple[bool, ...] = ()  # whether each layer has experts
    moe_ffn_hidden_size: int | None = None
    moe_router_topk: int | None = None
    moe_num_hash_layers: int = 0
    moe_router_score_function: str | None = None
    moe_router_pre_softmax: bool = False
    moe_router_num_groups: int | None = None
    moe_router_group_topk: int | None = None
    moe_router_group_score_topk: int | None = None
    moe_router_topk_scaling_factor: float | None = None
    moe_router_enable_expert_bias: bool = False
    moe_shared_expert_intermediate_size: int | None = None
    moe_shared_expert_gate: bool = False
    moe_latent_size: int | None = None
    multi_latent_attention: bool = False
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    qk_head_dim: int | None = None
    qk_pos_emb_head_dim: int | None = None
    v_head_dim: int | None = None
    mla_latent_norm_epsilon: float | None = None  # None: norm_epsilon
    rotary_scaling_factor: float = 1.0  # 1: no YaRN, and its other values are unset
    yarn_original_max_position_embeddings: int | None = None
    yarn_beta_fast: float | None = None
    yarn_beta_slow: float | None = None
    yarn_query_scaling_beta: float | None = None
    yarn_correction_range_round_to_int: bool = True
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    softmax_type: str = "vanilla"
    activation_func_clamp_value: float | None = None
    glu_linear_offset: float = 0.0
    mtp_num_layers: int | None = None  # with weights of their own
    mtp_hybrid_override_pattern: str | None = None
    has_binary_head: bool = False  # BERT: two sentences, two token types
    decoder_num_layers: int | None = None  # of T5, whose encoder has num_layers
    relative_attention_num_buckets: int | None = None
    relative_attention_max_distance: int | None = None
    pattern: str = ""  # of a hybrid: M a mixer, * attention, - an MLP, E experts
    mamba_state_dim: int | None = None
    mamba_head_dim: int | None = None
    mamba_num_groups: int | None = None
    mamba_num_heads: int | None = None
    linear_layers: tuple[bool, ...] = ()  # whether each layer has linear attention
    linear_norm_epsilon: float | None = None
    linear_allow_neg_eigval: bool = False
    linear_conv_kernel_dim: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32
    attention_output_gate: bool = False
    attention_variant: str | None = None  # sparse attention, or KDA in linear layers
    dsa_indexer_n_heads: int = 64
    dsa_indexer_head_dim: int = 128
    dsa_indexer_topk: int = 2048
    dsa_indexer_k_norm_epsilon: float | None = None  # None: norm_epsilon
    dsa_indexer_rope_interleaved: bool = False
    dsa_indexer_scoring_relu: bool = True
    dsa_indexer_topk_freq: int = 1
    dsa_indexer_skip_topk_offset: int = 0
    moe_router_dtype: str | None = field(default=None, compare=False)
    attention_dropout: float = field(default=0.0, compare=False)
    hidden_dropout: float = field(default=0.0, compare=False)
    others: tuple[str, ...] = ()  # flags that no family supports

    def __post_init__(self) -> None:
        """Normalize: replace values that mean the same by one form."""
        fill = object.__setattr__
        for is_read, names in _READ_BY_SOME:
            for name in () if is_read(self) else names:
                fill(self, name, getattr(ModelShape, name))
        of_parts = "linear_norm", "mla_latent_norm", "dsa_indexer_k_norm"
        for name in (f"{part}_epsilon" for part in of_parts):
            if getattr(self, name) == self.norm_epsilon:
                fill(self, name, None)
        if self.dsa_indexer_topk_freq == 1:
            fill(self, "dsa_indexer_skip_topk_offset", 0)
        if self.expert_layers and all(self.expert_layers) and self.moe_ffn_hidden_size:
            fill(self, "ffn_hidden_size", self.moe_ffn_hidden_size)
        if self.moe_router_num_groups == self.moe_router_group_topk:  # all groups are chosen
            for name in ("num_groups", "group_topk", "group_score_topk"):
                fill(self, f"moe_router_{name}", None)
        elif self.moe_router_topk == (
            (self.moe_router_group_score_topk or 0) * (self.moe_router_group_topk or 0)
        ):
            fill(self, "moe_router_group_score_topk", None)  # the default
        if self.is_reward:
            fill(self, "is_tied", False)
        if not any(self.without_rope):
            fill(self, "without_rope", ())
        if self.moe_router_topk_scaling_factor == 1:
            fill(self, "moe_router_topk_scaling_factor", None)
        if self.position_embedding_type == "relative" or set(self.pattern) == {"M"}:
            fill(self, "max_position_embeddings", ENDLESS)
        for symbols, values in _READ_BY.items():
            used = self.pattern + (self.mtp_hybrid_override_pattern or "")
            if model_kind(self.kind).is_hybrid and not set(symbols) & set(used):
                for name, value in values.items():
                    fill(self, name, value)

    @property
    def experimental_attention_variant(self) -> str | None:
        """Value of the flag of this name."""
        return self.attention_variant or (LINEAR_VARIANTS[0] if self.linear_layers else None)

    def differences(self, other: ModelShape) -> Iterator[str]:
        """Yield one phrase for each value in which ``other`` differs."""
        for f in fields(self):
            mine, others = getattr(self, f.name), getattr(other, f.name)
            if f.compare and mine != others:
                yield f"{f.name} {mine} (not {others})"


def shape_of(config: RunConfig, vocab_size: int) -> ModelShape:
    """Return the shape of the model that ``config`` builds for ``vocab_size`` tokens."""
    m = config.model
    lm = config.language_model
    kind = model_kind_of(config)
    heads = ("latent" if m.multi_latent_attention else "head") if m.qk_layernorm else None
    found = {**vars(lm), **vars(m)}
    values = {f.name: found[f.name] for f in fields(ModelShape) if f.name in found}
    values |= {
        "kind": lm.model_kind,
        "num_layers": lm.encoder_num_layers if kind.has_encoder else m.num_layers,
        "max_position_embeddings": lm.max_position_embeddings or 0,
        "vocab_size": vocab_size,
        "norm_epsilon": m.layernorm_epsilon,
        "apply_layernorm_1p": m.layernorm_zero_centered_gamma,
        "activation": _activation(m),
        "is_gated": m.gated_linear_unit,
        "add_qkv_bias": m.add_bias_linear or m.add_qkv_bias,
        "rope_scaling_factor": lm.rope_scaling_factor if lm.use_rope_scaling else None,
        "windows": tuple(
            window[0] if (window := window_of_layer(m, layer)) and window[0] >= 0 else None
            for layer in range(m.num_layers)
        ),
        "qk_norm": "wide" if m.qk_layernorm_full_width else heads,
        "without_rope": tuple(not layer_has_rope(m, layer) for layer in range(m.num_layers)),
        "softmax_scale": m.kv_channels**-0.5 if m.softmax_scale is None else m.softmax_scale,
        "residual_scale": 1.0 if m.residual_scale is None else m.residual_scale,
        "embedding_scale": _scale(m.embedding_scale, math.sqrt(m.hidden_size)),
        "output_scale": _scale(m.output_scale, m.hidden_size**-0.5),
        "mtp_num_layers": m.num_mtp_modules or None,
        "is_tied": not lm.untie_embeddings_and_output_weights,
        "is_reward": config.preference.reward_model,
        "has_binary_head": lm.bert_binary_head,
        "num_experts": m.num_moe_experts,
        "others": tuple(_others(config)),
        **_yarn(m, lm.max_position_embeddings),
    }
    if kind.is_hybrid:
        values["mamba_num_heads"] = m.mamba_num_heads or 2 * m.hidden_size // m.mamba_head_dim
        ratios = lm.hybrid_attention_ratio, lm.hybrid_mlp_ratio
        values["pattern"] = layer_pattern(m.num_layers, *ratios, lm.hybrid_override_pattern)
    elif m.num_moe_experts is not None:
        values["expert_layers"] = tuple(has_experts(m, layer) for layer in range(m.num_layers))
    linear = tuple(has_linear_attention(m, layer) for layer in range(m.num_layers))
    values["linear_layers"] = linear if any(linear) else ()
    if m.experimental_attention_variant == SPARSE_VARIANT or (
        m.experimental_attention_variant == KDA and any(linear)
    ):
        values["attention_variant"] = m.experimental_attention_variant
    return ModelShape(**values)


def _yarn(m: TransformerConfig, longest: int | None) -> dict[str, float | None]:
    if m.rope_type != "yarn" and not (m.multi_latent_attention and m.rope_type is None):
        return {"rotary_scaling_factor": 1.0}
    defaults = {
        "yarn_original_max_position_embeddings": longest,
        "yarn_beta_fast": 32.0,
        "yarn_beta_slow": 1.0,
    }
    return {name: value for name, value in defaults.items() if getattr(m, name) is None}


# Fields that `args_of` converts rather than copies.
_CONVERTED = frozenset(
    "kind vocab_size activation is_gated rope_scaling_factor windows without_rope qk_norm "
    "softmax_scale residual_scale embedding_scale output_scale is_tied is_reward expert_layers "
    "has_binary_head pattern linear_layers attention_variant others".split()
)


def args_of(shape: ModelShape) -> dict[str, object]:
    """Return the flags, dest -> value, that build ``shape``."""
    copied = {f.name: getattr(shape, f.name) for f in fields(shape) if f.name not in _CONVERTED}
    kind = model_kind(shape.kind)
    usual_softmax = shape.kv_channels**-0.5
    flags = copied | {
        "encoder_num_layers": shape.num_layers if kind.has_encoder else None,
        "bert_binary_head": shape.has_binary_head if kind.has_masked_lm_head else None,
        "hybrid_override_pattern": shape.pattern or None,
        "moe_layer_freq": [int(is_one) for is_one in shape.expert_layers] or None,
        "linear_attention_freq": [int(is_one) for is_one in shape.linear_layers] or None,
        "experimental_attention_variant": shape.experimental_attention_variant,
        "rope_type": "yarn" if shape.rotary_scaling_factor != 1 else None,
        "no_rope_freq": [*map(int, shape.without_rope)] or None,
        "softmax_scale": None if shape.softmax_scale == usual_softmax else shape.softmax_scale,
        "residual_scale": None if shape.residual_scale == 1 else shape.residual_scale,
        "embedding_scale": _scale_flag(shape.embedding_scale, math.sqrt(shape.hidden_size)),
        "output_scale": _scale_flag(shape.output_scale, shape.hidden_size**-0.5),
        "model_kind": shape.kind,
        "reward_model": shape.is_reward,
        "seq_length": shape.max_position_embeddings,
        "group_query_attention": shape.num_query_groups != shape.num_attention_heads,
        "rotary_base": int(shape.rotary_base),
        "use_rope_scaling": shape.rope_scaling_factor is not None,
        "rope_scaling_factor": shape.rope_scaling_factor or 8.0,
        "swiglu": shape.is_gated and shape.activation == "silu",
        "geglu": shape.is_gated and shape.activation not in ("silu", "quick_gelu"),
        "quick_geglu": shape.activation == "quick_gelu",
        "openai_gelu": shape.activation == "gelu_tanh",
        "bias_gelu_fusion": False,
        "relu": shape.activation == "relu",
        "squared_relu": shape.activation == "squared_relu",
        "qk_layernorm": shape.qk_norm is not None,
        "qk_layernorm_full_width": shape.qk_norm == "wide",
        "untie_embeddings_and_output_weights": not shape.is_tied,
    }
    seen = {window for window in shape.windows if window is not None}
    if len(seen) == 1:
        flags["window_size"] = [*seen, 0]
        if None in shape.windows:
            flags["window_attn_skip_freq"] = [int(w is not None) for w in shape.windows]
    return {name: value for name, value in flags.items() if value is not None}


def _scale_flag(scale: float, root: float) -> float | None:
    """Return the flag's value for a scale: 1 needs none, and 0 stands for the root."""
    if scale == 1:
        return None
    return 0.0 if scale == root else scale


def _scale(flag: float | None, root: float) -> float:
    """Return the scale that a flag's value asks for; the reverse of the above."""
    return 1.0 if flag is None else flag or root


def _activation(m: TransformerConfig) -> str:
    if m.activation_func is F.gelu:
        return "gelu_tanh" if m.bias_activation_fusion else "gelu"
    names: dict[object, str] = {
        **{F.silu: "silu", F.relu: "relu", openai_gelu: "gelu_tanh"},
        **{squared_relu: "squared_relu", quick_gelu: "quick_gelu"},
    }
    return names[m.activation_func]


def _others(config: RunConfig) -> Iterator[str]:
    m = config.model
    if m.num_moe_experts is not None:
        if m.load_balancing_types == ("sinkhorn",):
            yield "--moe-router-load-balancing-type sinkhorn"
        if m.moe_apply_probs_on_input:
            yield "--moe-apply-probs-on-input"
        if m.moe_expert_capacity_factor is not None:
            yield "--moe-expert-capacity-factor"
    if m.multi_latent_attention and m.rope_type == "rope" and m.rotary_scaling_factor != 1:
        yield "--rope-type rope"
    if layer_shapes(m) is not None:
        yield "--heterogeneous-layers-config-path"
    if config.language_model.spec and config.language_model.spec[0] != "local":
        yield "--spec"
    if m.qk_l2_norm:
        yield "--qk-l2-norm"
