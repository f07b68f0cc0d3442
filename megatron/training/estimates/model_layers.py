"""The layers of a run's model and their pipeline stages, as its kind describes them."""

from __future__ import annotations

from megatron.training.config.run import RunConfig
from megatron.training.models.layers import (
    Layer,
    stages_of_encoder_decoder,
    stages_of_stack,
)
from megatron.training.models.registry import model_kind_of


def layers_of(run: RunConfig) -> list[Layer]:
    """Every layer in order; behind a decoder those of multi-token prediction."""
    return model_kind_of(run).layers(run)


def layers_of_stages(run: RunConfig) -> tuple[range, ...]:
    """Which of `layers_of` each virtual stage holds, without those of multi-token prediction."""
    has_encoder = model_kind_of(run).has_encoder
    return stages_of_encoder_decoder(run) if has_encoder else stages_of_stack(run)
