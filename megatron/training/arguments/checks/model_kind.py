"""Checks that the description of the model kind declares."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.training.config.language_model import MODEL_KINDS
from megatron.training.config.run import PRETRAINING, RunConfig
from megatron.training.models.registry import model_kind, model_kind_of


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
    if run.objective not in (PRETRAINING, *kind.objectives):
        yield (
            f"{run.objective} is not implemented for {kind.title}: it is for models of "
            f"{_scripts_with(run.objective)}"
        )
    yield from kind.problems(run)


def _scripts_with(objective: str) -> str:
    kinds = (model_kind(name) for name in MODEL_KINDS)
    return ", ".join(kind.entry_script for kind in kinds if objective in kind.objectives)
