"""Hundreds of steps leave no more Python objects than tens do, and none that only gc can free."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import pytest
import torch

from megatron.training import training
from megatron.training.runtime.context import StepResult
from megatron.training.step.run import Callback, TrainingRun
from tests.support.ranks import run_ranks
from tests.support.runs import TINY, train_gpt
from tests.support.soak import grown
from tests.support.soak_probe import Probe, finish_save, read_samples

FIRST, EVERY, LAST = 50, 70, 190  # steps of the samples
WORK = (
    f"--train-iters {LAST} --eval-interval 20 --save-interval 20 --async-save "
    "--keep-last-checkpoints 2 --log-interval 10 --log-timers-to-tensorboard "
    "--log-memory-to-tensorboard --global-batch-size 4 --use-distributed-optimizer"
).split()


class Leavings(Callback):
    """Finds, at the last step, objects that only a garbage collection frees."""

    def __init__(self) -> None:
        self.types: set[str] = set()

    def on_train_start(self, run: TrainingRun) -> None:
        gc.collect()
        gc.disable()

    def on_step_end(self, run: TrainingRun, result: StepResult) -> None:
        if run.state.iteration < LAST:
            return
        finish_save(run)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        kinds = {type(each) for each in gc.garbage}
        ours = [k for k in kinds if k is torch.Tensor or k.__module__.startswith("megatron.")]
        self.types = {kind.__qualname__ for kind in ours}
        gc.set_debug(0)
        gc.garbage.clear()


def _train(rank: int, world_size: int, folder: Path, flags: Sequence[str]) -> set[str]:
    built, leavings = training.default_callbacks, Leavings()

    def with_probe(run):
        callbacks = built(run)
        callbacks.append(leavings)
        callbacks.append(Probe(folder / f"samples.{rank}", FIRST, EVERY))
        return callbacks

    with mock.patch.object(training, "default_callbacks", with_probe):
        train_gpt(rank, world_size, flags)
    return leavings.types


@pytest.mark.feature("Reliability: memory stays flat over thousands of steps (make soak)")
@pytest.mark.parametrize("world_size", [1, 2])
def test_steps_saves_and_evaluations_leave_nothing_behind(tmp_path, world_size):
    flags = [*TINY, *WORK, "--save", str(tmp_path / "saved")]
    flags += ["--tensorboard-dir", str(tmp_path / "board")]
    flags += ["--metrics-file", str(tmp_path / "metrics.jsonl")]
    assert run_ranks(_train, world_size, tmp_path, flags) == [set()] * world_size
    for rank in range(world_size):
        samples = read_samples(tmp_path / f"samples.{rank}")
        assert grown(samples) == {}
        descriptors = [sample["descriptors"] for sample in samples]
        # A background save may have one file open at one of the samples.
        assert max(descriptors) - min(descriptors) <= 1
