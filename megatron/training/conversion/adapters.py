"""Adapters of a checkpoint: their matrices, and the weights of the base with them added."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from megatron.core.config.errors import CheckpointError
from megatron.core.config.value_types import Arguments
from megatron.core.dist_checkpointing.safetensors_file import LazyTensor
from megatron.core.peft.lora import (
    ALL_LINEAR,
    WHOLE,
    LoraConfig,
    is_of_adapter,
    split_name,
    stack_rows,
)
from megatron.training.config.adapters import AdaptersConfig
from megatron.training.conversion.shape import ModelShape

EMBEDDING = "embedding.word_embeddings"
_OUTPUT = "output_layer"
FLAGS = ("lora_rank", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_use_rslora")


@dataclass(frozen=True)
class Pair:
    """A [r, i] and B [o, r] of one matrix; its weight grows by scale * B A."""

    a: Tensor
    b: Tensor
    scale: float


def lora_of(args: Arguments) -> LoraConfig:
    """Return the settings of the adapters that a checkpoint's command line describes."""
    given = {name: args[name] for name in FLAGS if args.get(name) is not None}
    given["lora_target_modules"] = tuple(given.get("lora_target_modules", (ALL_LINEAR,)))
    found = AdaptersConfig(**given).lora
    if found is None:
        raise CheckpointError("the checkpoint names a base and no --lora-rank")
    return found


def merged(
    weights: Mapping[str, LazyTensor], args: Arguments, shape: ModelShape
) -> dict[str, LazyTensor]:
    """Return the weights of the base with the adapters added, computed in float32.

    Raises CheckpointError for an adapter of a tied embedding or output layer.
    """
    out = {name: tensor for name, tensor in weights.items() if not is_of_adapter(name)}
    for layer, pairs in pairs_of(weights, lora_of(args), shape).items():
        name = f"{layer}.weight"
        if name not in out or (layer == EMBEDDING and shape.is_tied):
            raise CheckpointError(
                f"the adapter of {layer} cannot be merged: embedding and output layer share one "
                "weight; train without an adapter there, or with "
                "--untie-embeddings-and-output-weights"
            )
        tensor = out[name]
        make = partial(_sum, tensor, pairs, rows_of(layer, tensor.shape, shape), layer)
        out[name] = LazyTensor(name, tensor.dtype, tensor.shape, make)
    return out


def _sum(
    tensor: LazyTensor, pairs: Mapping[str, Pair], rows: Mapping[str, int], layer: str
) -> Tensor:
    weight = tensor.make()
    groups = weight.shape[0] // max(1, sum(rows.values()))
    deltas = {part: (p.b.float() @ p.a.float()) * p.scale for part, p in pairs.items()}
    if WHOLE in deltas:
        delta = deltas[WHOLE].t() if layer == EMBEDDING else deltas[WHOLE]
        if len(delta) < len(weight):  # padding of the vocabulary
            delta = F.pad(delta, (0, 0, 0, len(weight) - len(delta)))
    else:
        columns = [deltas[part].t() if part in deltas else None for part in rows]
        like = next(each for each in columns if each is not None)
        delta = stack_rows(columns, tuple(rows.values()), like, groups).t()
    return (weight.float() + delta).to(weight.dtype)


def pairs_of(
    weights: Mapping[str, LazyTensor], config: LoraConfig, shape: ModelShape
) -> dict[str, dict[str, Pair]]:
    """Return the matrices of all adapters by layer and part, without padding of the vocabulary.

    An embedding has [r, v] and [h, r], as in PEFT.
    """
    found: dict[str, dict[str, Pair]] = {}
    for name in sorted(filter(is_of_adapter, weights)):
        layer, matrix, part = split_name(name)
        if matrix == "b":
            continue
        a = weights[name].make()
        b = weights[f"{name[:-1]}b"].make()
        a = a[: shape.vocab_size].t() if layer == EMBEDDING else a
        b = b[: shape.vocab_size] if layer == _OUTPUT else b
        found.setdefault(layer, {})[part] = Pair(a, b, config.scale)
    return found


def rows_of(layer: str, size: Sequence[int], shape: ModelShape) -> dict[str, int]:
    """Return the parts of a layer's weight of shape ``size``, with their rows in one group."""
    own = layer.rsplit(".", 1)[-1]
    if own == "linear_qkv":
        heads = shape.num_attention_heads // shape.num_query_groups
        return {"q": heads * shape.kv_channels, "k": shape.kv_channels, "v": shape.kv_channels}
    if own == "linear_fc1" and shape.is_gated:
        return {"gate": size[0] // 2, "up": size[0] // 2}
    return {WHOLE: size[0]}
