"""When the host waits for the device in a step: for its gradient norm, after the update is queued.

Seen on a CPU: every time that Python asks a tensor for a number.  Data that is being read lies on
the host anyway, and is left out, like the values of the step before that the log writes.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.rerun.state_machine import SentNorm
from megatron.training.step import train_step as steps
from tests.support import selection
from tests.support.ranks import run_ranks
from tests.support.runs import TINY, train_gpt

LEFT_OUT = ("/datasets/", "torch/utils/data", "callbacks/metrics")
PASSES = "the passes are queued"
NORM = "the norm is read"
UPDATE = "the update is queued"
# On a GPU the device asserts, other ways are taken, and the loss scale lies on the host.
ONLY_HERE = {
    "layers.py:check_token_ids",
    "linear_cross_entropy.py:_loss_of",
    "step_result.py:complete_result",
    "ops.py:_update",
    "update_rules.py:step",
    "update_rules.py:_on_device",
}


class _Waits(TorchDispatchMode):
    """Notes, step by step, who asks for numbers, and what is queued."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[list[str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self.note()
        return func(*args, **(kwargs or {}))

    def note(self) -> None:
        """Note the caller."""
        stack = traceback.extract_stack()
        ours = [f for f in stack if "/megatron/" in f.filename]
        if ours[-1].filename.endswith("async_host_copy.py"):
            ours.pop()
        places = [f"{Path(f.filename).name}:{f.name}" for f in ours]
        is_norm = "state_machine.py:read" in places  # noted once, by `read`
        is_left_out = any(part in f.filename for f in stack for part in LEFT_OUT)
        if self.steps and not (is_norm or is_left_out or places[-1] in ONLY_HERE):
            self.steps[-1].append(places[-1])


def counted(rank: int, world_size: int, argv: Sequence[str]) -> list[list[str]]:
    waits, step, to_list = _Waits(), steps.train_step, Tensor.tolist
    update, reduce, read = MegatronOptimizer._step, steps.reduce_gradients, SentNorm.read

    def train_step(run: Any) -> Any:
        waits.steps.append([])
        return step(run)

    def queue(*args: Any) -> None:
        waits.steps[-1].append(UPDATE)
        update(*args)

    def reduced(*args: Any) -> None:
        reduce(*args)
        waits.steps[-1].append(PASSES)

    def read_norm(norm: SentNorm) -> Any:
        waits.steps[-1].append(NORM)
        return read(norm)

    def tolist(tensor: Tensor) -> Any:
        waits.note()
        return to_list(tensor)

    with (
        mock.patch.object(steps, "train_step", train_step),
        mock.patch.object(MegatronOptimizer, "_step", queue),
        mock.patch.object(steps, "reduce_gradients", reduced),
        mock.patch.object(SentNorm, "read", read_norm),
        mock.patch.object(Tensor, "tolist", tolist),
        waits,
    ):
        train_gpt(rank, world_size, argv)
    return waits.steps[2:-1]  # the first ones make state, the last is evaluated


def _train(tmp_path: Path, ranks: int, flags: str) -> list[list[list[str]]]:
    words = "--train-iters 5 --log-interval 100 --metrics-file"
    argv = [*TINY, *words.split(), str(tmp_path / "metrics"), *flags.split()]
    found: list[list[list[str]]] = run_ranks(counted, ranks, argv)
    return found


@pytest.mark.feature("Speed: the update is queued before the host reads the gradient norm")
@pytest.mark.parametrize(
    ("ranks", "flags"),
    selection.first(
        4,
        [
            (1, "--bf16 --fp8-format hybrid --fp8-recipe delayed"),
            (2, "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
            (2, "--use-torch-fsdp2 --no-gradient-accumulation-fusion"),
            (2, "--pipeline-model-parallel-size 2 --fp16 --initial-loss-scale 64"),
            (2, "--tensor-model-parallel-size 2 --sequence-parallel --hidden-dropout 0.1"),
            (1, "--bf16"),
            (2, "--pipeline-model-parallel-size 2"),
            (1, "--rerun-mode disabled"),
            (1, "--fp16 --loss-scale 64"),
        ],
    ),
)
def test_a_step_waits_for_its_norm_alone(tmp_path: Path, ranks: int, flags: str) -> None:
    flags = f"--no-check-for-nan-in-loss-and-grad {flags}"
    for found in _train(tmp_path, ranks, flags):
        assert found == [[PASSES, UPDATE, NORM]] * 2


def test_the_loss_of_each_micro_batch_is_read_in_the_next_one(tmp_path: Path) -> None:
    (found,) = _train(tmp_path, 1, "")
    assert found == [["non_finite.py:check"] * 4 + [PASSES, UPDATE, NORM]] * 2
