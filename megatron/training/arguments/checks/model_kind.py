"""Checks that the description of the model kind declares."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.training.config.run import RunConfig
from megatron.training.models.registry import model_kind_of


def the_kind_can_do_the_run(run: RunConfig) -> Iterator[str]:
    """Apply the rules of the model kind, which user code may define.

    Some models do not support context parallelism, because each rank needs all tokens of a
    sequence.
    """
    kind, size = model_kind_of(run), run.model.context_parallel_size
    if size > 1 and not kind.supports_context_parallel:
        yield (
            f"--context-parallel-size {size} with {kind.title}: {kind.title} does not support "
            "context parallelism; for long sequences use --tensor-model-parallel-size with "
            "--sequence-parallel"
        )
    yield from kind.problems(run)
