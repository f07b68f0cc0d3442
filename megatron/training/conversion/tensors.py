"""Global names and shapes of a model's tensors, and rules to convert them from and to others.

Letters of shapes (their values are `ModelShape.dims`):

- v vocabulary, p positions, h hidden size, hh twice that, b buckets of relative positions
- attention: n heads, d head width, q rows of queries, k rows of keys, 2k of keys and values, qkv of
  all three
- MLP: f inner width, F rows of its first matrix (2 f if gated); of an expert x and X, of the shared
  experts s and S; e number of experts
- latent attention: lq and lk ranks of queries and of keys and values, lkr rank lk with the rotary
  part, kv rows of the up-projected keys and values, o rows of values
- Mamba mixer: i inner width, m heads, c channels of the convolution, w its width, z rows of in_proj

An integer stands for itself.  A star marks the dimension that tensor parallelism shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.conversion.shape import ModelShape
from megatron.training.models.registry import model_kind

AHEAD = "mtp.layers.{}."  # multi-token prediction layers
AHEAD_LAYER = "transformer_layer."
Heads: TypeAlias = ModelShape | TransformerConfig  # numbers and widths of heads of attention


@dataclass(frozen=True)
class Rule:
    """How their tensors make up one of ours; by default they are concatenated along dimension 0.

    ``is_qkv``: theirs have all queries, then all keys, then all values, in one tensor or in three,
    or keys and values in two; ours is ordered by query group.  ``transposed``: their matrices are
    [in, out].  ``by_turns``: in theirs, rows of the gate and of the up projection alternate.
    """

    theirs: tuple[str, ...]
    is_qkv: bool = False
    transposed: bool = False
    by_turns: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether ours is the concatenation of theirs."""
        return not (self.is_qkv or self.transposed or self.by_turns)

    def to_ours(self, parts: Sequence[Tensor], shape: Heads) -> Tensor:
        """Convert their tensors, in the order of ``theirs``, to ours."""
        parts = [part.t() if self.transposed else part for part in parts]
        if self.by_turns:
            return torch.cat([part[first::2] for first in range(2) for part in parts])
        if self.is_qkv:
            if len(parts) == 1:
                parts = parts[0].split([shape.num_query_groups * n for n in _group_rows(shape)])
            groups = [part.unflatten(0, (shape.num_query_groups, -1)) for part in parts]
            return torch.cat(groups, 1).flatten(0, 1)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def to_theirs(self, ours: Tensor, shape: Heads) -> list[Tensor]:
        """Convert our tensor to theirs, in the order of ``theirs``; views where possible."""
        parts: Sequence[Tensor] = [ours]
        if self.by_turns:
            parts = [torch.stack(ours.chunk(2), 1).flatten(0, 1)]
        elif self.is_qkv:
            groups = ours.unflatten(0, (shape.num_query_groups, -1))
            sizes = _group_rows(shape)[1:] if len(self.theirs) == 2 else _group_rows(shape)
            parts = [part.flatten(0, 1) for part in groups.split(sizes, 1)]
            if len(self.theirs) == 1:
                parts = [torch.cat(list(parts))]
        elif len(self.theirs) > 1:
            parts = ours.chunk(len(self.theirs))
        return [part.t() if self.transposed else part for part in parts]


def tensors_of(shape: ModelShape) -> dict[str, tuple[str, ...]]:
    """Return global name -> letters of the shape, for every tensor of the model."""
    return {name: tuple(letters.split()) for name, letters in _KINDS[shape.kind](shape)}


def output_of(shape: ModelShape) -> str:
    """Return the name of the output layer's weight in a model that does not tie it."""
    prefix = "lm_head." if model_kind(shape.kind).has_encoder else ""
    return f"{prefix}output_layer.weight"


def size_of(letters: Sequence[str], shape: ModelShape) -> tuple[int, ...]:
    """Return the sizes that ``letters`` stand for."""
    plain = (letter.removeprefix("*") for letter in letters)
    return tuple(int(each) if each.isdecimal() else shape.dims[each] for each in plain)


Named = Iterator[tuple[str, str]]


def _gpt(shape: ModelShape) -> Named:
    yield from _embedding(shape)
    for layer in range(shape.num_layers):
        yield from _within(f"decoder.layers.{layer}.", _in_layer(shape, layer))
    yield from _norm("decoder.final_layernorm", "h", shape)
    for depth in range(shape.mtp_num_layers or 0):
        yield from _within(AHEAD.format(depth), _ahead(shape))
    yield from _output(shape)


def _bert(shape: ModelShape) -> Named:
    yield from _embedding(shape)
    if shape.has_binary_head:
        yield "embedding.tokentype_embeddings.weight", "2 h"
    for layer in range(shape.num_layers):
        yield from _within(f"encoder.layers.{layer}.", _in_layer(shape, layer))
    yield from _norm("encoder.final_layernorm", "h", shape)
    yield from _module("lm_head.dense", "h h", True)
    yield from _norm("lm_head.layer_norm", "h", shape)
    yield "output_layer.bias", "*v"
    yield from _output(shape)
    if shape.has_binary_head:
        yield from _module("pooler.dense", "h h", True)
        yield from _module("binary_head", "2 h", True)


def _t5(shape: ModelShape) -> Named:
    yield from _embedding(shape)
    stacks = {"encoder": shape.num_layers, "decoder": shape.decoder_num_layers or 0}
    if shape.position_embedding_type == "relative":
        for stack in stacks:
            yield f"{stack}_relative_pos_emb.relative_attention_bias.weight", "b n"
    for stack, count in stacks.items():
        for layer in range(count):
            prefix = f"{stack}.layers.{layer}."
            yield from _within(prefix, _in_layer(shape, layer))
            if stack == "decoder":
                yield from _within(prefix, _cross_attention(shape))
        yield from _norm(f"{stack}.final_layernorm", "h", shape)
    yield from _output(shape)
    if shape.is_tied and shape.add_bias_linear:
        yield "lm_head.output_layer.bias", "*v"


def _mamba(shape: ModelShape) -> Named:
    yield from _embedding(shape)
    for layer, symbol in enumerate(shape.pattern):
        yield from _within(f"decoder.layers.{layer}.", _LAYERS_OF_PATTERN[symbol](shape))
    yield from _norm("decoder.final_norm", "h", shape)
    yield from _output(shape)


_KINDS: dict[str, Callable[[ModelShape], Named]] = {
    "gpt": _gpt,
    "bert": _bert,
    "t5": _t5,
    "mamba": _mamba,
}


def _within(prefix: str, named: Named) -> Named:
    return ((prefix + name, letters) for name, letters in named)


def _embedding(shape: ModelShape) -> Named:
    yield "embedding.word_embeddings.weight", "*v h"
    if shape.position_embedding_type == "learned_absolute":
        yield "embedding.position_embeddings.weight", "p h"


def _output(shape: ModelShape) -> Named:
    if shape.is_reward:
        yield "score.weight", "1 h"
    elif not shape.is_tied:
        yield output_of(shape), "*v h"


def _in_layer(shape: ModelShape, layer: int) -> Named:
    yield from _attention_part(shape)
    yield from _mlp_part(shape, bool(shape.expert_layers) and shape.expert_layers[layer])


def _attention_part(shape: ModelShape) -> Named:
    placement = shape.layer_norm_placement
    if placement != "post":
        yield from _norm("input_layernorm", "h", shape)
    attention = _latent_attention if shape.multi_latent_attention else _attention
    yield from _within("self_attention.", attention(shape))
    if placement != "pre":
        yield from _norm("post_self_attn_layernorm", "h", shape)


def _mlp_part(shape: ModelShape, has_experts: bool = False) -> Named:
    placement = shape.layer_norm_placement
    if placement != "post":
        yield from _norm("pre_mlp_layernorm", "h", shape)
    yield from _within("mlp.", _experts(shape) if has_experts else _mlp("", "f", shape))
    if placement != "pre":
        yield from _norm("post_mlp_layernorm", "h", shape)


def _cross_attention(shape: ModelShape) -> Named:
    yield from _norm("pre_cross_attn_layernorm", "h", shape)
    yield from _module("cross_attention.linear_q", "*q h", shape.add_qkv_bias)
    yield from _module("cross_attention.linear_kv", "*2k h", shape.add_qkv_bias)
    yield from _module("cross_attention.linear_proj", "h *q", shape.add_bias_linear)


def _mixer(shape: ModelShape) -> Named:
    yield from _norm("norm", "h", shape)
    sizes = {
        **{"in_proj.weight": "*z h", "conv1d.weight": "*c 1 w", "conv1d.bias": "*c"},
        **{"A_log": "*m", "D": "*m", "dt_bias": "*m", "norm.weight": "*i"},
        "out_proj.weight": "h *i",
    }
    yield from _within("mixer.", iter(sizes.items()))


_LAYERS_OF_PATTERN: dict[str, Callable[[ModelShape], Named]] = {
    "M": _mixer,
    "*": _attention_part,
    "-": _mlp_part,
    "E": lambda shape: _mlp_part(shape, True),
}


def _ahead(shape: ModelShape) -> Named:
    for name in ("enorm", "hnorm"):
        yield from _norm(name, "h", shape)
    yield "eh_proj.weight", "h hh"
    for name, letters in _in_layer(shape, shape.num_layers - 1):
        yield AHEAD_LAYER + name, letters
    yield from _norm("final_layernorm", "h", shape)


def _attention(shape: ModelShape) -> Named:
    if shape.softmax_type == "learnable":
        yield "core_attention.softmax_offset", "*n"
    yield from _module("linear_qkv", "*qkv h", shape.add_qkv_bias)
    if shape.qk_norm == "wide":
        yield "q_layernorm.weight", "*q"
        yield "k_layernorm.weight", "*k"
    elif shape.qk_norm == "head":
        yield from _norm("q_layernorm", "d", shape)
        yield from _norm("k_layernorm", "d", shape)
    yield from _module("linear_proj", "h *q", shape.add_bias_linear)


def _latent_attention(shape: ModelShape) -> Named:
    if shape.q_lora_rank is None:
        yield "linear_q_proj.weight", "*q h"
    else:
        yield "linear_q_down_proj.weight", "lq h"
        yield "linear_q_up_proj.weight", "*q lq"
    yield "linear_kv_down_proj.weight", "lkr h"
    yield "linear_kv_up_proj.weight", "*kv lk"
    if shape.qk_norm is not None:
        if shape.q_lora_rank is not None:
            yield from _norm("q_layernorm", "lq", shape)
        yield from _norm("kv_layernorm", "lk", shape)
    yield from _module("linear_proj", "h *o", shape.add_bias_linear)


def _mlp(name: str, letter: str, shape: ModelShape) -> Named:
    yield from _module(f"{name}linear_fc1", f"*{letter.upper()} h", shape.add_bias_linear)
    yield from _module(f"{name}linear_fc2", f"h *{letter}", shape.add_bias_linear)


def _experts(shape: ModelShape) -> Named:
    yield from _module("router", "e h", shape.add_bias_linear)
    if shape.moe_router_enable_expert_bias:
        yield "router.expert_bias", "e"
    for number in range(shape.num_experts or 0):
        yield from _mlp(f"experts.local_experts.{number}.", "x", shape)
    if shape.moe_shared_expert_intermediate_size:
        yield from _mlp("shared_experts.", "s", shape)
        if shape.moe_shared_expert_gate:
            yield "shared_experts.gate_weight", "1 h"


def _norm(name: str, letter: str, shape: ModelShape) -> Named:
    return _module(name, letter, shape.normalization == "LayerNorm")


def _module(name: str, letters: str, has_bias: bool) -> Named:
    yield f"{name}.weight", letters
    if has_bias:
        yield f"{name}.bias", letters.split()[0]


def _group_rows(shape: Heads) -> list[int]:
    """Return the rows of queries, of keys and of values in a query group."""
    heads = shape.num_attention_heads // shape.num_query_groups
    return [heads * shape.kv_channels, shape.kv_channels, shape.kv_channels]
