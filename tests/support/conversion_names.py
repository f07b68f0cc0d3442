"""Tensors of a model of `transformers` under our names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from megatron.core.dist_checkpointing.safetensors_file import LazyTensor
from megatron.training.conversion import hf


def in_our_names(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights, or gradients, of ``model`` as the conversion lays them out."""
    lazy = {n: LazyTensor(n, t.dtype, tuple(t.shape), t.detach) for n, t in tensors.items()}
    made = hf.import_model(model.config.to_dict(), lazy).tensors
    return {name: tensor.make() for name, tensor in made.items()}
