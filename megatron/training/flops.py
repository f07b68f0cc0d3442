"""Model FLOPs: what a step computes by the mathematics of the model, not what the device executes.

Counted are matrix multiplications (two operations per multiply-add), forward once and backward
twice.  Recomputation, norms, softmax and the optimizer are not.

Two counts exist.  They differ in attention alone:
- `num_floating_point_operations` is Megatron-LM's formula, behind "throughput per GPU": a query
  meets half of the sequence.
- `causal_model_flops` is behind "MFU": query i meets exactly the i + 1 keys that the causal mask
  leaves, fewer under a sliding window.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from megatron.core.transformer.attention_masks import window_of_layer
from megatron.core.transformer.heterogeneous.heterogeneous_config import (
    FULL,
    LINEAR,
    LayerShape,
    layer_shapes,
)
from megatron.core.transformer.layer_layout import has_experts
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.config.run import RunConfig

FORWARD_AND_BACKWARD = 3
MULTIPLY_ADD = 2


@dataclass(frozen=True, kw_only=True)
class ModelFlops:
    """FLOPs of training on one batch, split by where they arise."""

    linear: float  # products with weights: projections, MLP, logits
    attention: float  # queries with keys, and scores with values

    @property
    def total(self) -> float:
        """All of them."""
        return self.linear + self.attention


def num_floating_point_operations(
    config: RunConfig, batch_size: int, padded_vocab_size: int
) -> float:
    """FLOPs of a step on ``batch_size`` samples by Megatron-LM's formula."""
    seq_length = _seq_length(config)
    keys = [seq_length / 2] * (config.model.num_layers + _num_ahead(config.model))
    return _model_flops(config.model, batch_size * seq_length, padded_vocab_size, keys).total


def causal_model_flops(config: RunConfig, batch_size: int, padded_vocab_size: int) -> ModelFlops:
    """FLOPs of a step on ``batch_size`` samples with attention counted under its mask."""
    num_tokens = batch_size * _seq_length(config)
    return _model_flops(config.model, num_tokens, padded_vocab_size, _causal_keys(config))


def layer_flops(config: RunConfig) -> list[float]:
    """FLOPs of each layer for one token, attention counted under its mask.

    Behind the decoder's stand those of tokens ahead, without their projections.
    """
    scale = FORWARD_AND_BACKWARD * MULTIPLY_ADD
    return [
        scale * (config.model.hidden_size * columns + 2 * heads_width * keys)
        for columns, heads_width, keys in _layer_widths(config.model, _causal_keys(config))
    ]


def _causal_keys(config: RunConfig) -> list[float]:
    """Keys that a query meets on average in each layer."""
    keys = [
        mean_keys_per_query(_seq_length(config), _keys_in_window(config.model, layer_index))
        for layer_index in range(config.model.num_layers)
    ]
    return keys + keys[-1:] * _num_ahead(config.model)


def mean_keys_per_query(seq_length: int, window: int | None = None) -> float:
    """Keys a query meets on average: itself and what stands before it, at most ``window``."""
    window = seq_length if window is None else min(window, seq_length)
    growing = window * (window + 1) / 2  # queries that do not fill the window yet
    return (growing + (seq_length - window) * window) / seq_length


def _keys_in_window(model: TransformerConfig, layer_index: int) -> int | None:
    """Keys before a query, and the query's own, that its window holds; None without a limit."""
    window = window_of_layer(model, layer_index)
    return None if window is None or window[0] < 0 else window[0] + 1


def _model_flops(
    model: TransformerConfig,
    num_tokens: int,
    padded_vocab_size: int,
    keys_per_query: Iterable[float],  # one number per layer
) -> ModelFlops:
    layers = list(_layer_widths(model, keys_per_query))
    columns = padded_vocab_size + sum(columns for columns, _, _ in layers)
    columns += _num_ahead(model) * (padded_vocab_size + 2 * model.hidden_size)
    scores = sum(heads_width * keys for _, heads_width, keys in layers)
    scale = FORWARD_AND_BACKWARD * MULTIPLY_ADD * num_tokens
    return ModelFlops(
        linear=float(scale * model.hidden_size * columns), attention=float(scale * 2 * scores)
    )


def _layer_widths(
    model: TransformerConfig, keys_per_query: Iterable[float]
) -> Iterator[tuple[float, int, float]]:
    """Of each layer: columns of its matrices of h rows, width of its heads, keys per query.

    Per token and full layer, with h = hidden, a = heads, g = query groups, d = kv channels:
    q and output projection 2*h*a*d, k and v 2*h*g*d, MLP 2 or (gated) 3 times h*ffn,
    scores and their product with the values 2*a*d*keys; per token h*vocabulary.  A part that is
    replaced by one matrix has h*h, an absent one nothing.  Layers of tokens ahead, each like the
    last of the decoder, add a projection 2*h*h and h*vocabulary.
    """
    heads_width = model.num_attention_heads * model.kv_channels
    latent = _latent_columns(model) if model.multi_latent_attention else None
    if latent is not None:  # the mean of those of keys and of values
        heads_width = model.num_attention_heads * (model.kv_channels + model.v_head_dim) // 2
    groups_width = model.num_query_groups * model.kv_channels
    mlp_matrices = 3 if model.gated_linear_unit else 2
    alike = LayerShape(FULL, FULL, model.ffn_hidden_size)
    shapes = list(layer_shapes(model) or [alike] * model.num_layers)
    shapes += shapes[-1:] * _num_ahead(model)
    for layer_index, (shape, keys) in enumerate(zip(shapes, keys_per_query, strict=True)):
        full = 2 * heads_width + 2 * groups_width if latent is None else latent
        attention = {FULL: full, LINEAR: model.hidden_size}
        mlp = {FULL: mlp_matrices * (shape.ffn_hidden_size or 0), LINEAR: model.hidden_size}
        if has_experts(model, layer_index):
            mlp[FULL] = _expert_columns(model)
        columns = attention.get(shape.attention, 0) + mlp.get(shape.mlp, 0)
        yield columns, heads_width, keys if shape.attention == FULL else 0.0


def _num_ahead(model: TransformerConfig) -> int:
    return model.mtp_num_layers or 0


def _latent_columns(model: TransformerConfig) -> float:
    """Elements of the matrices of latent attention, in columns of h rows."""
    heads, hidden = model.num_attention_heads, model.hidden_size
    query = heads * (model.qk_head_dim + model.qk_pos_emb_head_dim)
    key_value = heads * (model.qk_head_dim + model.v_head_dim)
    narrow = model.kv_lora_rank + model.qk_pos_emb_head_dim + heads * model.v_head_dim
    raised = model.kv_lora_rank * key_value
    if model.q_lora_rank is None:
        return narrow + query + raised / hidden
    return narrow + model.q_lora_rank + (raised + model.q_lora_rank * query) / hidden


def _expert_columns(model: TransformerConfig) -> int:
    """Columns of the matrices that a token meets: router, chosen experts, shared ones."""
    assert model.num_moe_experts is not None, "called for a layer with experts"
    width = model.moe_router_topk * (model.moe_ffn_hidden_size or 0)
    width += model.moe_shared_expert_intermediate_size or 0
    gate = 1 if model.moe_shared_expert_gate else 0
    return (3 if model.gated_linear_unit else 2) * width + model.num_moe_experts + gate


def _seq_length(config: RunConfig) -> int:
    assert config.data.seq_length is not None, "resolve() has checked --seq-length"
    return config.data.seq_length
