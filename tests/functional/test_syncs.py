"""How often a step makes the host wait for the device, and that the update is queued before.

Seen on a CPU: every time that Python asks a tensor for a number.  Data that is being read lies on
the host anyway, and is left out.
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
from megatron.training import loop
from tests.functional.runs import TINY, train_gpt
from tests.ranks import run_ranks

AHEAD = ("/datasets/", "torch/utils/data", "async_host_copy")  # of the device: nothing to wait for
NORM = "rerun_state_machine.py:read_squared_norm"
UPDATE = "the update is queued"
# On a GPU the device asserts, other ways are taken, and the loss scale lies on the host.
ONLY_HERE = {
    "layers.py:check_token_ids",
    "linear_cross_entropy.py:_loss_of",
    "train_step.py:train_step",
    "adam.py:_update",
    "update_rules.py:step",
    "update_rules.py:_on_device",
}


class _Waits(TorchDispatchMode):
    """Notes, step by step, who asks for numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[list[str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self.note()
        return func(*args, **(kwargs or {}))

    def note(self) -> None:
        """Note the caller; data and late reads are no waiting, but that of the norm is."""
        stack = traceback.extract_stack()
        ours = [f for f in stack if "/megatron/" in f.filename]
        places = [f"{Path(f.filename).name}:{f.name}" for f in ours]
        is_late = any(part in f.filename for f in stack for part in AHEAD)
        if self.steps and (NORM in places or not is_late):
            place = NORM if NORM in places else places[-1]
            is_known = place == NORM and self.steps[-1][-1:] == [NORM]  # two values of one copy
            self.steps[-1] += [] if is_known or place in ONLY_HERE else [place]


def counted(rank: int, world_size: int, argv: Sequence[str]) -> list[list[str]]:
    waits, step, to_list = _Waits(), loop.train_step, Tensor.tolist
    update = MegatronOptimizer._step

    def train_step(run: Any) -> Any:
        waits.steps.append([])
        return step(run)

    def queue(*args: Any) -> None:
        waits.steps[-1].append(UPDATE)
        update(*args)

    def tolist(tensor: Tensor) -> Any:
        waits.note()
        return to_list(tensor)

    with (
        mock.patch.object(loop, "train_step", train_step),
        mock.patch.object(MegatronOptimizer, "_step", queue),
        mock.patch.object(Tensor, "tolist", tolist),
        waits,
    ):
        train_gpt(rank, world_size, argv)
    return waits.steps[2:-1]  # the first ones make state, the last is evaluated


@pytest.mark.feature("Speed: the host waits once a step, while the device computes the update")
@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (1, "--bf16"),
        (2, "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
        (2, "--pipeline-model-parallel-size 2 --fp16 --initial-loss-scale 64"),
        (2, "--tensor-model-parallel-size 2 --sequence-parallel --hidden-dropout 0.1"),
        (1, "--bf16 --fp8-format hybrid --fp8-recipe delayed"),
    ],
)
def test_the_host_waits_once_a_step(tmp_path: Path, ranks: int, flags: str) -> None:
    words = "--train-iters 5 --log-interval 100 --metrics-file"
    argv = [*TINY, *words.split(), str(tmp_path / "metrics"), *flags.split()]
    for steps in run_ranks(counted, ranks, argv):
        assert steps == [[UPDATE, NORM]] * 2
