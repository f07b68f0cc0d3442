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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from megatron.core.config.errors import CheckpointError
from megatron.core.dist_checkpointing.safetensors_file import LazyTensor
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.conversion.lazy import shared_parts
from megatron.training.conversion.shape import ModelShape

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

    def to_ours(self, parts: Sequence[Tensor], shape: Heads) -> Tensor:
        """Convert their tensors, in the order of ``theirs``, to ours."""
        parts = [part.t() if self.transposed else part for part in parts]
        if self.by_turns:
            return torch.cat([part[first::2] for first in range(2) for part in parts])
        if self.is_qkv:
            if len(parts) == 1:
                parts = parts[0].split([shape.num_query_groups * n for n in group_rows(shape)])
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
            sizes = group_rows(shape)[1:] if len(self.theirs) == 2 else group_rows(shape)
            parts = [part.flatten(0, 1) for part in groups.split(sizes, 1)]
            if len(self.theirs) == 1:
                parts = [torch.cat(list(parts))]
        elif len(self.theirs) > 1:
            parts = ours.chunk(len(self.theirs))
        return [part.t() if self.transposed else part for part in parts]

    def join(
        self, name: str, parts: Sequence[LazyTensor], shape: Heads, size: tuple[int, ...]
    ) -> LazyTensor:
        """Return our tensor ``name`` of ``size``, made of ``parts`` once it is used.

        Raises CheckpointError if their dtypes differ, or their shapes do not give ``size``.
        """
        dtype = parts[0].dtype
        if any(part.dtype != dtype for part in parts):
            raise CheckpointError(f"{parts[0].name} and its kin have different dtypes")
        joined = LazyTensor(
            name, dtype, size, lambda: self.to_ours([part.make() for part in parts], shape)
        )
        wanted = [part.shape for part in self.split(joined, shape)]
        if [part.shape for part in parts] != wanted:
            has = ", ".join(f"{part.name} {list(part.shape)}" for part in parts)
            needed = ", ".join(str(list(each)) for each in wanted)
            raise CheckpointError(f"{has}: config.json asks for {needed} in {name}")
        return joined

    def split(self, ours: LazyTensor, shape: Heads) -> list[LazyTensor]:
        """Return the tensors that `to_theirs` makes of ``ours`` once they are used, in order."""
        like = torch.empty(ours.shape, dtype=ours.dtype, device=torch.device("meta"))
        sizes = [tuple(part.shape) for part in self.to_theirs(like, shape)]
        makes = shared_parts(lambda: self.to_theirs(ours.make(), shape), len(sizes))
        return [
            LazyTensor(name, ours.dtype, size, make)
            for name, size, make in zip(self.theirs, sizes, makes, strict=True)
        ]


# Part of a model -> its tensors: name, shape, and the `_facts` that a model with it has.
_PARTS = {
    "embedding": """
        embedding.word_embeddings.weight             *v,h
        embedding.position_embeddings.weight         p,h      learned_positions
        embedding.tokentype_embeddings.weight        2,h      binary_head
    """,
    "relative positions": """
        encoder_relative_pos_emb.relative_attention_bias.weight  b,n  relative
        decoder_relative_pos_emb.relative_attention_bias.weight  b,n  relative
    """,
    "attention": """
        input_layernorm.weight                       h        norm_before
        input_layernorm.bias                         h        norm_before layer_norm
        self_attention.core_attention.softmax_offset *n       usual sink
        self_attention.linear_qkv.weight             *qkv,h   usual
        self_attention.linear_qkv.bias               *qkv     usual qkv_bias
        self_attention.q_layernorm.weight            *q       usual wide
        self_attention.k_layernorm.weight            *k       usual wide
        self_attention.q_layernorm.weight            d        usual head
        self_attention.q_layernorm.bias              d        usual head layer_norm
        self_attention.k_layernorm.weight            d        usual head
        self_attention.k_layernorm.bias              d        usual head layer_norm
        self_attention.linear_proj.weight            h,*q     usual
        self_attention.linear_q_proj.weight          *q,h     latent full_q
        self_attention.linear_q_down_proj.weight     lq,h     latent low_q
        self_attention.linear_q_up_proj.weight       *q,lq    latent low_q
        self_attention.linear_kv_down_proj.weight    lkr,h    latent
        self_attention.linear_kv_up_proj.weight      *kv,lk   latent
        self_attention.q_layernorm.weight            lq       latent low_q qk_norm
        self_attention.q_layernorm.bias              lq       latent low_q qk_norm layer_norm
        self_attention.kv_layernorm.weight           lk       latent qk_norm
        self_attention.kv_layernorm.bias             lk       latent qk_norm layer_norm
        self_attention.linear_proj.weight            h,*o     latent
        self_attention.linear_proj.bias              h        bias
        post_self_attn_layernorm.weight              h        norm_behind
        post_self_attn_layernorm.bias                h        norm_behind layer_norm
    """,
    "cross attention": """
        pre_cross_attn_layernorm.weight              h
        pre_cross_attn_layernorm.bias                h        layer_norm
        cross_attention.linear_q.weight              *q,h
        cross_attention.linear_q.bias                *q       qkv_bias
        cross_attention.linear_kv.weight             *2k,h
        cross_attention.linear_kv.bias               *2k      qkv_bias
        cross_attention.linear_proj.weight           h,*q
        cross_attention.linear_proj.bias             h        bias
    """,
    "before mlp": """
        pre_mlp_layernorm.weight                     h        norm_before
        pre_mlp_layernorm.bias                       h        norm_before layer_norm
    """,
    "mlp": """
        mlp.linear_fc1.weight                        *F,h
        mlp.linear_fc1.bias                          *F       bias
        mlp.linear_fc2.weight                        h,*f
        mlp.linear_fc2.bias                          h        bias
    """,
    "router": """
        mlp.router.weight                            e,h
        mlp.router.bias                              e        bias
        mlp.router.expert_bias                       e        expert_bias
    """,
    "expert": """
        linear_fc1.weight                            *X,h
        linear_fc1.bias                              *X       bias
        linear_fc2.weight                            h,*x
        linear_fc2.bias                              h        bias
    """,
    "shared experts": """
        mlp.shared_experts.linear_fc1.weight         *S,h     shared
        mlp.shared_experts.linear_fc1.bias           *S       shared bias
        mlp.shared_experts.linear_fc2.weight         h,*s     shared
        mlp.shared_experts.linear_fc2.bias           h        shared bias
        mlp.shared_experts.gate_weight               1,h      shared gate
    """,
    "after mlp": """
        post_mlp_layernorm.weight                    h        norm_behind
        post_mlp_layernorm.bias                      h        norm_behind layer_norm
    """,
    "mixer": """
        norm.weight                                  h
        norm.bias                                    h        layer_norm
        mixer.in_proj.weight                         *z,h
        mixer.conv1d.weight                          *c,1,w
        mixer.conv1d.bias                            *c
        mixer.A_log                                  *m
        mixer.D                                      *m
        mixer.dt_bias                                *m
        mixer.norm.weight                            *i
        mixer.out_proj.weight                        h,*i
    """,
    "end": """
        final_layernorm.weight                       h
        final_layernorm.bias                         h        layer_norm
    """,
    "end of mamba": """
        final_norm.weight                            h
        final_norm.bias                              h        layer_norm
    """,
    "ahead": """
        enorm.weight                                 h
        enorm.bias                                   h        layer_norm
        hnorm.weight                                 h
        hnorm.bias                                   h        layer_norm
        eh_proj.weight                               h,hh
    """,
    "output": """
        score.weight                                 1,h      reward
        output_layer.weight                          *v,h     untied
    """,
    "output of bert": """
        lm_head.dense.weight                         h,h
        lm_head.dense.bias                           h
        lm_head.layer_norm.weight                    h
        lm_head.layer_norm.bias                      h        layer_norm
        output_layer.bias                            *v
        output_layer.weight                          *v,h     untied
        pooler.dense.weight                          h,h      binary_head
        pooler.dense.bias                            h        binary_head
        binary_head.weight                           2,h      binary_head
        binary_head.bias                             2        binary_head
    """,
    "output of t5": """
        lm_head.output_layer.weight                  *v,h     untied
        lm_head.output_layer.bias                    *v       tied bias
    """,
}
# Part of a layer, M, * and - as in the pattern of a hybrid, c of the decoder of T5 -> its parts.
_OF_SYMBOL = {
    "M": ("mixer",),
    "*": ("attention",),
    "-": ("before mlp", "mlp", "after mlp"),
    "c": ("cross attention",),
}


def _facts(shape: ModelShape) -> set[str]:
    facts = {
        "bias": shape.add_bias_linear,
        "qkv_bias": shape.add_qkv_bias,
        "layer_norm": shape.normalization == "LayerNorm",
        "norm_before": shape.layer_norm_placement != "post",
        "norm_behind": shape.layer_norm_placement != "pre",
        "learned_positions": shape.position_embedding_type == "learned_absolute",
        "relative": shape.position_embedding_type == "relative",
        "binary_head": shape.has_binary_head,
        "latent": shape.multi_latent_attention,
        "usual": not shape.multi_latent_attention,
        "full_q": shape.q_lora_rank is None,
        "low_q": shape.q_lora_rank is not None,
        "qk_norm": shape.qk_norm is not None,
        "wide": shape.qk_norm == "wide",
        "head": shape.qk_norm == "head",
        "sink": shape.softmax_type == "learnable",
        "expert_bias": shape.moe_router_enable_expert_bias,
        "shared": bool(shape.moe_shared_expert_intermediate_size),
        "gate": shape.moe_shared_expert_gate,
        "reward": shape.is_reward,
        "tied": shape.is_tied,
        "untied": not (shape.is_tied or shape.is_reward),
    }
    return {name for name, is_so in facts.items() if is_so}


def tensors_of(shape: ModelShape) -> dict[str, tuple[str, ...]]:
    """Return global name -> letters of the shape, for every tensor of the model."""
    facts = _facts(shape)
    parts = {
        part: [
            (name, tuple(letters.split(",")))
            for name, letters, *needed in map(str.split, table.strip().splitlines())
            if facts.issuperset(needed)
        ]
        for part, table in _PARTS.items()
    }
    return {
        prefix + name: letters for prefix, part in _parts_of(shape) for name, letters in parts[part]
    }


def _parts_of(shape: ModelShape) -> Iterator[tuple[str, str]]:
    """Yield the parts of the model in order, each with the prefix of its names."""
    of_layers = ["*E" if has_experts else "*-" for has_experts in shape.expert_layers]
    of_layers = of_layers or ["*-"] * shape.num_layers
    stacks: dict[str, Sequence[str]] = {"decoder": of_layers}
    end = "end"
    if shape.kind == "bert":
        stacks = {"encoder": of_layers}
    elif shape.kind == "t5":
        stacks = {"encoder": of_layers, "decoder": ["*-c"] * (shape.decoder_num_layers or 0)}
    elif shape.kind == "mamba":
        stacks = {"decoder": shape.pattern}
        end = "end of mamba"
    yield "", "embedding"
    if shape.kind == "t5":
        yield "", "relative positions"
    for stack, layers in stacks.items():
        for number, symbols in enumerate(layers):
            yield from _layer(f"{stack}.layers.{number}.", symbols, shape)
        yield f"{stack}.", end
    for depth in range(shape.mtp_num_layers or 0):
        prefix = AHEAD.format(depth)
        yield prefix, "ahead"
        yield from _layer(prefix + AHEAD_LAYER, of_layers[-1], shape)
        yield prefix, "end"
    yield "", f"output of {shape.kind}" if shape.kind in ("bert", "t5") else "output"


def _layer(prefix: str, symbols: str, shape: ModelShape) -> Iterator[tuple[str, str]]:
    for symbol in symbols:
        for part in _OF_SYMBOL.get(symbol, ()):
            yield prefix, part
        if symbol == "E":
            yield prefix, "before mlp"
            yield prefix, "router"
            for number in range(shape.num_experts or 0):
                yield f"{prefix}mlp.experts.local_experts.{number}.", "expert"
            yield prefix, "shared experts"
            yield prefix, "after mlp"


def output_of(shape: ModelShape) -> str:
    """Return the name of the output layer's weight in a model that does not tie it."""
    return f"{'lm_head.' if shape.kind == 't5' else ''}output_layer.weight"


def size_of(letters: Sequence[str], shape: ModelShape) -> tuple[int, ...]:
    """Return the sizes that ``letters`` stand for."""
    plain = (letter.removeprefix("*") for letter in letters)
    return tuple(int(each) if each.isdecimal() else shape.dims[each] for each in plain)


def group_rows(shape: Heads) -> list[int]:
    """Return the rows of queries, of keys and of values in a query group."""
    heads = shape.num_attention_heads // shape.num_query_groups
    return [heads * shape.kv_channels, shape.kv_channels, shape.kv_channels]
