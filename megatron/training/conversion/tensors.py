"""Global names and shapes of a model's tensors, and rules to convert them from and to others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeAlias

import torch
from torch import Tensor

from megatron.core.config.errors import CheckpointError
from megatron.core.config.value_types import Shape
from megatron.core.dist_checkpointing.safetensors_file import LazyTensor
from megatron.core.params.param_info import info_of
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.conversion.lazy import shared_parts
from megatron.training.conversion.shape import ModelShape, args_of
from megatron.training.conversion.source import default_args, run_config
from megatron.training.conversion.verify import model_on_meta

Heads: TypeAlias = ModelShape | TransformerConfig  # numbers and widths of heads of attention

BUFFERS = (".expert_bias", ".tid2eid")  # tensors of a model that are no parameters


@dataclass(frozen=True)
class Rule:
    """How their tensors make up one of ours; by default they are concatenated along dimension 0.

    ``is_qkv``: theirs have all queries, then all keys, then all values, in one tensor or in three,
    or keys and values in two; ours is ordered by query group.  ``transposed``: their matrices are
    [in, out].  ``by_turns``: in theirs, rows of the gate and of the up projection alternate.
    ``view``: shape of theirs, which has dimensions of size 1 besides -1.  ``rows``: for other
    orders, returns for each of theirs the index in ours of each of its rows.
    """

    theirs: tuple[str, ...]
    is_qkv: bool = False
    transposed: bool = False
    by_turns: bool = False
    view: tuple[int, ...] = ()
    rows: Callable[[Heads], Sequence[Tensor]] | None = None

    def to_ours(self, parts: Sequence[Tensor], shape: Heads) -> Tensor:
        """Convert their tensors, in the order of ``theirs``, to ours."""
        parts = [part.t() if self.transposed else part for part in parts]
        if self.view:
            return parts[0].flatten()
        if self.rows is not None:
            return torch.cat(list(parts))[torch.cat(list(self.rows(shape))).argsort()]
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
        if self.view:
            parts = [ours.view(self.view)]
        elif self.rows is not None:
            parts = [ours[rows] for rows in self.rows(shape)]
        elif self.by_turns:
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
        joined = LazyTensor(name, dtype, size, Joined(self, parts, shape))
        wanted = [part.shape for part in self.split(joined, shape)]
        found = [part.shape for part in parts]
        if self.rows is not None and torch.cat(list(self.rows(shape))).diff().eq(1).all():
            # transformers may write the same rows in equal parts.
            found, wanted = ([(sum(n[0] for n in each), *each[0][1:])] for each in (found, wanted))
        if found != wanted:
            has = ", ".join(f"{part.name} {list(part.shape)}" for part in parts)
            needed = ", ".join(str(list(each)) for each in wanted)
            raise CheckpointError(f"{has}: config.json asks for {needed} in {name}")
        return joined

    def split(self, ours: LazyTensor, shape: Heads) -> list[LazyTensor]:
        """Return the tensors that `to_theirs` makes of ``ours`` once they are used, in order."""
        # Computed without `to_theirs`: joining meta tensors imports torch's compiler.
        rows, *columns = ours.shape
        sizes = [tuple(rows if n == -1 else n for n in self.view) or (rows, *columns)]
        if self.rows is not None:
            sizes = [(len(numbers), *columns) for numbers in self.rows(shape)]
        elif self.is_qkv and len(self.theirs) > 1:
            groups = group_rows(shape)[1:] if len(self.theirs) == 2 else group_rows(shape)
            sizes = [(shape.num_query_groups * count, *columns) for count in groups]
        elif len(self.theirs) > 1 and not self.by_turns:
            chunks = torch.empty(rows, device="meta").chunk(len(self.theirs))
            sizes = [(len(chunk), *columns) for chunk in chunks]
        sizes = [size[::-1] if self.transposed else size for size in sizes]
        makes = shared_parts(lambda: self.to_theirs(ours.make(), shape), len(sizes))
        return [
            LazyTensor(name, ours.dtype, size, make)
            for name, size, make in zip(self.theirs, sizes, makes, strict=True)
        ]


@dataclass(frozen=True)
class Joined:
    """Our tensor made of ``parts``; `box` reads only the rows and columns of a box."""

    rule: Rule
    parts: Sequence[LazyTensor]
    heads: Heads

    def __call__(self) -> Tensor:
        """Return the complete tensor."""
        return self.rule.to_ours([part.make() for part in self.parts], self.heads)

    def box(self, offset: Shape, shape: Shape) -> Tensor:
        """Return the box of ``shape`` at ``offset``.

        Our order of rows is found by converting the numbers of their rows.
        """
        sources = [part.make() for part in self.parts]
        sources = [source.t() if self.rule.transposed else source for source in sources]
        counts = [len(source) for source in sources]
        numbers = self.rule.to_ours(list(torch.arange(sum(counts)).split(counts)), self.heads)
        wanted = numbers[offset[0] : offset[0] + shape[0]]
        out = torch.empty(shape, dtype=self.parts[0].dtype)
        first = 0
        for source in sources:
            is_here = (wanted >= first) & (wanted < first + len(source))
            for dim in range(1, len(shape)):
                source = source.narrow(dim, offset[dim], shape[dim])
            out[is_here] = source[wanted[is_here] - first]
            first += len(source)
        return out


def box_of(tensor: LazyTensor, offset: Shape, shape: Shape) -> Tensor:
    """Return the box of ``shape`` at ``offset`` of ``tensor``.

    Of a tensor that is mapped from a file, only this box is read.
    """
    if shape == tensor.shape:
        return tensor.make()
    if isinstance(tensor.make, Joined):
        return tensor.make.box(offset, shape)
    return tensor.make()[tuple(slice(at, at + n) for at, n in zip(offset, shape, strict=True))]


@lru_cache(maxsize=1)
def tensors_of(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return global name -> shape, without padding, of every tensor of the model.

    Builds the model of the flags on the device "meta", without storage.  Raises MegatronError if
    the flags do not describe a valid model.
    """
    flags = args_of(replace(shape, is_reward=False)) | {"tokenizer_type": "NullTokenizer"}
    run = run_config(default_args() | flags | {"vocab_size": shape.vocab_size})
    try:
        model = model_on_meta(run, shape.vocab_size)
    except RuntimeError as error:  # more bytes than torch can count
        raise CheckpointError(f"config.json describes too large a model: {error}") from None
    sizes = {info.name: info.global_shape for info in map(info_of, model.parameters())}
    sizes |= {n: tuple(b.shape) for n, b in model.named_buffers() if n.endswith(BUFFERS)}
    if shape.is_reward:
        del sizes["output_layer.weight"]
        sizes["score.weight"] = (1, shape.hidden_size)
    # Layers and experts in the order of their numbers.
    in_order = sorted(
        sizes,
        key=lambda name: [part.zfill(9) if part.isdecimal() else part for part in name.split(".")],
    )
    return {name: sizes[name] for name in in_order}


def output_of(shape: ModelShape) -> str:
    """Return the name of the output layer's weight in a model that does not tie it."""
    return f"{'lm_head.' if shape.kind == 't5' else ''}output_layer.weight"


def group_rows(shape: Heads) -> list[int]:
    """Return the rows of queries, with their gates, of keys and of values in a query group."""
    heads = shape.num_attention_heads // shape.num_query_groups * (1 + shape.attention_output_gate)
    return [heads * shape.kv_channels, shape.kv_channels, shape.kv_channels]
