"""Store the frozen weights below adapters in 8 or 4 bits (as QLoRA does)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from megatron.core.config.errors import ConfigError
from megatron.core.params.param_info import info_of
from megatron.core.tensor_parallel.frozen_weight import FrozenWeight, StoredFormat, stored
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, Linear, RowParallelLinear

_OUTSIDE = ("output_layer",)
_SHARDED = (ColumnParallelLinear, RowParallelLinear)


def stored_tensors(model: nn.Module) -> Iterator[Tensor]:
    """Yield the codes and scales of the stored weights of ``model``."""
    for layer in model.modules():
        if isinstance(layer, Linear) and isinstance(layer.quantizer, FrozenWeight):
            held = vars(layer.quantizer.weight).values()
            yield from (tensor for tensor in held if isinstance(tensor, Tensor))


@torch.no_grad()
def store_base(chunks: Sequence[nn.Module], format: StoredFormat) -> None:
    """Store the weights of all linear layers but the output layer in ``format``.

    The parameters keep their shapes and records, and no memory: their values are lost, so the base
    must have been loaded and named before.  Collective over the ranks that shard a weight.  Raises
    ConfigError for a weight that the format cannot hold.
    """
    for chunk in chunks:
        for name, layer in chunk.named_modules():
            if not isinstance(layer, Linear) or layer.weight is None or name.endswith(_OUTSIDE):
                continue
            weight = layer.weight
            group = layer.tp_group if isinstance(layer, _SHARDED) else None
            try:
                layer.quantizer = FrozenWeight(stored(weight, format, group))
            except ValueError as error:
                raise ConfigError(
                    f"--lora-base-dtype {format}: {info_of(weight).name}: {error}; use fp8 or int8"
                ) from None
            weight.data = weight.new_zeros(()).expand(weight.shape)
