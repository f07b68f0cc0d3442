"""A run that trains, built from a command line as `pretrain` builds it, without data or logs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pretrain_gpt
from megatron.training.initialize import configure, start
from megatron.training.runtime import setup
from megatron.training.step.run import TrainingRun


def training_run(argv: Sequence[str], entry: Any = pretrain_gpt) -> TrainingRun:
    """Return the run of ``argv`` with the model of ``entry``, a script.  Collective."""
    context = start(configure(argv=argv))
    chunks = setup.build_model_chunks(context, entry.model_provider)
    optimizer, scheduler = setup.build_optimizer(context, chunks)
    return TrainingRun(
        **vars(context),
        model_chunks=chunks,
        forward_step_func=entry.forward_step,
        optimizer=optimizer,
        scheduler=scheduler,
    )
