"""Tensors of encoders from Hugging Face and back, in memory."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from megatron.training.conversion.family import Config
from megatron.training.conversion.lazy import as_lazy
from megatron.training.conversion.vision import Encoder, export_encoder, import_encoder


def encoder_from_hf(
    model: Encoder, config: Config, tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the tensors of ``model`` from theirs."""
    return {n: t.make() for n, t in import_encoder(model, config, as_lazy(tensors)).items()}


def encoder_to_hf(
    model: Encoder, config: Config, tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return ``tensors``, complete ones under our names, under theirs."""
    return {t.name: t.make() for t in export_encoder(model, config, as_lazy(tensors))}
