"""Layers of a run's model and of its pipeline stages, as its model kind describes them."""

from __future__ import annotations

from megatron.training.config.run import RunConfig
from megatron.training.models.layers import (
    Layer,
    stages_of_encoder_decoder,
    stages_of_stack,
)
from megatron.training.models.registry import model_kind_of


def layers_of(run: RunConfig) -> list[Layer]:
    """Return every layer in order; layers of multi-token prediction follow the decoder's."""
    return model_kind_of(run).layers(run)


def layers_of_stages(run: RunConfig) -> tuple[range, ...]:
    """Return the indices in `layers_of` that each virtual stage holds, without MTP layers."""
    has_encoder = model_kind_of(run).has_encoder
    return stages_of_encoder_decoder(run) if has_encoder else stages_of_stack(run)
