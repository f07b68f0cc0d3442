"""When the host waits for the device in a step: for the norm of the step before, if at all.

Seen on a CPU: every time that Python asks a tensor for a number.  Data that is being read lies on
the host anyway, and is left out, like what the log writes of the step before.
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

from megatron.core.diagnostics.sent_norm import SentNorm
from megatron.core.optimizer import MegatronOptimizer
from megatron.training import loop
from megatron.training.callbacks import Callback, Runtime, StepResult
from megatron.training.step import train_step as steps
from tests.functional.runs import TINY, train_gpt
from tests.ranks import run_ranks

LEFT_OUT = ("/datasets/", "torch/utils/data", "callbacks/late_step", "callbacks/interval")
PASSES = "the passes are queued"
NORM = "the norm of {} is read"
UPDATE = "the update is queued"
# On a GPU the device asserts, other ways are taken, and the loss scale lies on the host.
ONLY_HERE = {
    "layers.py:check_token_ids",
    "linear_cross_entropy.py:_loss_of",
    "step_result.py:judge",
    "adam.py:_update",
    "update_rules.py:step",
    "update_rules.py:_on_device",
}


class _Waits(TorchDispatchMode):
    """Notes, step by step, who asks for numbers, and what is queued."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[list[str]] = []
        self.norms: list[SentNorm] = []  # in the order of the steps

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self.note()
        return func(*args, **(kwargs or {}))

    def note(self) -> None:
        """Note the caller."""
        stack = traceback.extract_stack()
        ours = [f for f in stack if "/megatron/" in f.filename]
        places = [f"{Path(f.filename).name}:{f.name}" for f in ours]
        is_norm = "sent_norm.py:read" in places  # noted once, by `read`
        is_left_out = any(part in f.filename for f in stack for part in LEFT_OUT)
        if self.steps and not (is_norm or is_left_out or places[-1] in ONLY_HERE):
            self.steps[-1].append(places[-1])


def counted(rank: int, world_size: int, argv: Sequence[str]) -> list[list[str]]:
    waits, step, to_list = _Waits(), loop.train_step, Tensor.tolist
    update, passes, read = MegatronOptimizer._step, steps._gradients, SentNorm.read
    send = MegatronOptimizer._send_norm

    def train_step(run: Any, **how: Any) -> Any:
        waits.steps.append([])
        return step(run, **how)

    def queue(*args: Any) -> None:
        waits.steps[-1].append(UPDATE)
        update(*args)

    def gradients(*args: Any, **how: Any) -> Any:
        done = passes(*args, **how)
        waits.steps[-1].append(PASSES)
        return done

    def sent(*args: Any, **how: Any) -> SentNorm:
        waits.norms.append(send(*args, **how))
        return waits.norms[-1]

    def read_norm(norm: SentNorm) -> Any:
        of = next(i for i, known in enumerate(waits.norms) if known is norm)
        waits.steps[-1].append(NORM.format(of - len(waits.steps) + 1))
        return read(norm)

    def tolist(tensor: Tensor) -> Any:
        waits.note()
        return to_list(tensor)

    with (
        mock.patch.object(loop, "train_step", train_step),
        mock.patch.object(MegatronOptimizer, "_step", queue),
        mock.patch.object(MegatronOptimizer, "_send_norm", sent),
        mock.patch.object(steps, "_gradients", gradients),
        mock.patch.object(SentNorm, "read", read_norm),
        mock.patch.object(Tensor, "tolist", tolist),
        waits,
    ):
        train_gpt(rank, world_size, argv)
    return waits.steps[2:-1]  # the first ones make state, the last is evaluated


DURING_THE_NEXT_STEP = [PASSES, NORM.format(-1), UPDATE]
NEXT_BACKWARD = [NORM.format(-1), PASSES, UPDATE]  # it multiplies the loss by the loss scale
AT_THE_END = [PASSES, UPDATE, NORM.format(0)]


def _train(tmp_path: Path, ranks: int, flags: str) -> list[list[list[str]]]:
    words = "--train-iters 5 --log-interval 100 --metrics-file"
    argv = [*TINY, *words.split(), str(tmp_path / "metrics"), *flags.split()]
    found: list[list[list[str]]] = run_ranks(counted, ranks, argv)
    return found


@pytest.mark.feature("Speed: a step ends before the device has computed its gradient norm")
@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (1, "--bf16"),
        (2, "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
        (2, "--tensor-model-parallel-size 2 --sequence-parallel --hidden-dropout 0.1"),
        (1, "--bf16 --fp8-format hybrid --fp8-recipe delayed"),
        (2, "--pipeline-model-parallel-size 2"),
        (2, "--use-torch-fsdp2 --no-gradient-accumulation-fusion"),
        (1, "--no-check-for-nan-in-loss-and-grad --rerun-mode disabled"),
        (1, "--fp16 --loss-scale 64"),
    ],
)
def test_a_step_waits_for_nothing(tmp_path: Path, ranks: int, flags: str) -> None:
    for found in _train(tmp_path, ranks, flags):
        assert found == [DURING_THE_NEXT_STEP] * 2


def test_a_dynamic_loss_scale_waits_in_the_next_backward_pass(tmp_path: Path) -> None:
    flags = "--pipeline-model-parallel-size 2 --fp16 --initial-loss-scale 64"
    first, last = _train(tmp_path, 2, flags)
    assert first == [DURING_THE_NEXT_STEP] * 2
    assert last == [NEXT_BACKWARD] * 2


@pytest.mark.parametrize(
    "flags", ["--log-interval 1", "--callback tests.functional.test_syncs:Reads"]
)
def test_a_step_whose_result_is_needed_waits_while_the_device_updates(
    tmp_path: Path, flags: str
) -> None:
    (found,) = _train(tmp_path, 1, f"--no-check-for-nan-in-loss-and-grad {flags}")
    assert [step[:3] for step in found] == [AT_THE_END] * 2  # then the line is logged


class Reads(Callback):
    """Reads the result of every step."""

    def on_step_end(self, run: Runtime, result: StepResult) -> None:
        assert result.is_judged
        assert result.grad_norm > 0.0
        assert not result.skipped
