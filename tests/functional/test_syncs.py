"""How often a step makes the host wait for the device: each place is named.

Seen on a CPU: every time that Python asks a tensor for a number.  Data that is being read lies on
the host anyway, and is left out.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.training import loop
from tests.functional.runs import TINY, train_gpt
from tests.ranks import run_ranks

AHEAD = ("/datasets/", "torch/utils/data", "async_host_copy")  # of the device: nothing to wait for
NORM = "rerun_state_machine.py:read_squared_norm"
# On a GPU the device asserts, other ways are taken, and the loss scale lies on the host.
ONLY_HERE = {
    "layers.py:check_token_ids",
    "linear_cross_entropy.py:_loss_of",
    "train_step.py:train_step",
    "adam.py:update",
}


class _Waits(TorchDispatchMode):
    """Counts, step by step, who asks for numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Counter[str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self.note()
        return func(*args, **(kwargs or {}))

    def note(self) -> None:
        """Count the caller; data and late reads are no waiting."""
        stack = traceback.extract_stack()
        if self.steps and not any(part in f.filename for f in stack for part in AHEAD):
            ours = [f for f in stack if "/megatron/" in f.filename]
            place = f"{Path(ours[-1].filename).name}:{ours[-1].name}"
            self.steps[-1].update([place] if place not in ONLY_HERE else [])


def counted(rank: int, world_size: int, argv: Sequence[str]) -> list[Counter[str]]:
    waits, step, to_list = _Waits(), loop.train_step, Tensor.tolist

    def train_step(run: Any) -> Any:
        waits.steps.append(Counter())
        return step(run)

    def tolist(tensor: Tensor) -> Any:
        waits.note()
        return to_list(tensor)

    with (
        mock.patch.object(loop, "train_step", train_step),
        mock.patch.object(Tensor, "tolist", tolist),
        waits,
    ):
        train_gpt(rank, world_size, argv)
    return waits.steps[2:-1]  # the first ones make state, the last is evaluated


@pytest.mark.feature("Speed: the host waits once a step, for the gradient norm")
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
        assert steps == [{NORM: 1}] * 2
