"""Flags without which there is no run."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.training.config.run import RunConfig


def shape_is_given(run: RunConfig) -> Iterator[str]:
    """Sizes that have no sensible default."""
    m = run.model
    for flag, value in (
        ("--num-layers", m.num_layers),
        ("--hidden-size", m.hidden_size),
        ("--num-attention-heads", m.num_attention_heads),
        ("--seq-length", run.data.seq_length),
        ("--max-position-embeddings", run.language_model.max_position_embeddings),
        ("--micro-batch-size", run.training.micro_batch_size),
    ):
        if not value:
            yield f"{flag} is required"


CHECKS = (shape_is_given,)
