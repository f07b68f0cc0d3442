"""The optimizer in host memory: the same numbers, and what lies where.

The ways of a GPU are taken with the CPU's memory in both places.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core import device
from megatron.core.optimizer.mixed_precision import batches, chosen
from megatron.core.optimizer.reduced_precision_state import StateStorage
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from tests.support import tolerances
from tests.unit.optimizer.test_optimizer import Run

OFFLOAD = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0, "clip_grad": 0.1}
KINDS: list[dict[str, Any]] = [
    {},
    {"optimizer": "sgd", "optimizer_offload_fraction": 0.5},
    {"dtype": torch.bfloat16, "overlap_cpu_optimizer_d2h_h2d": True},
    {"dtype": torch.float16, "optimizer_offload_fraction": 0.3, "initial_loss_scale": 64.0},
    {
        "dtype": torch.bfloat16,
        "use_precision_aware_optimizer": True,
        "exp_avg_dtype": "bf16",
        "optimizer_offload_fraction": 0.5,
    },
]


@pytest.fixture
def _host_is_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "host_is_apart", lambda: True)


def state(run: Run) -> dict[str, Tensor]:
    return {
        f"{kind} of {name}": (s.read() if isinstance(s, StateStorage) else s).clone()
        for name, _, kinds in run.optimizer.named_state()
        for kind, s in kinds.items()
    }


@pytest.mark.feature("Optimizer: state and update in host memory, resumed bit for bit")
@pytest.mark.usefixtures("_host_is_apart")
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_an_update_on_the_host_is_the_same_update(alone: ProcessGroupCollection, kind: dict):
    plain = Run(alone, **{**OFFLOAD, **kind, "optimizer_cpu_offload": False})
    away = Run(alone, **{**OFFLOAD, **kind})
    assert {bool(p.host) for p in away.optimizer.params} == (
        {True, False} if "optimizer_offload_fraction" in kind else {True}
    )
    for seed in range(6):
        assert away.step(seed) == plain.step(seed)
    torch.testing.assert_close(
        away.model.state_dict(), plain.model.state_dict(), **tolerances.BITWISE
    )
    torch.testing.assert_close(state(away), state(plain), **tolerances.BITWISE)


@pytest.mark.usefixtures("_host_is_apart")
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_checkpoint_goes_on_on_the_host_and_off_it(alone: ProcessGroupCollection, kind: dict):
    whole, first = Run(alone, **{**OFFLOAD, **kind}), Run(alone, **{**OFFLOAD, **kind})
    second = Run(alone, **{**OFFLOAD, **kind, "optimizer_cpu_offload": False})
    third = Run(alone, **{**OFFLOAD, **kind})
    for seed in range(6):
        whole.step(seed)
    for seed in range(3):
        first.step(seed)
    saved = state(first)
    for run in (second, third):
        run.model.load_state_dict(first.model.state_dict())
        for name, _, kinds in run.optimizer.named_state():
            for what, kept in kinds.items():
                values = saved[f"{what} of {name}"]
                kept.write(values) if isinstance(kept, StateStorage) else kept.copy_(values)
        run.optimizer.load_scalar_state(first.optimizer.scalar_state())
        for seed in range(3, 6):
            run.step(seed)
        torch.testing.assert_close(
            run.model.state_dict(), whole.model.state_dict(), **tolerances.BITWISE
        )


def test_on_a_cpu_nothing_lies_elsewhere(alone: ProcessGroupCollection):
    run = Run(alone, **OFFLOAD)
    assert not any(p.host for p in run.optimizer.params)
    assert run.optimizer.state_tensors(on_host=True) == []


@pytest.mark.usefixtures("_host_is_apart")
def test_a_skipped_step_leaves_everything(alone: ProcessGroupCollection):
    run = Run(alone, dtype=torch.bfloat16, overlap_cpu_optimizer_d2h_h2d=True, **OFFLOAD)
    before = state(run)
    assert run.step(factor=float("nan")) == (False, None, None)
    torch.testing.assert_close(state(run), before, **tolerances.BITWISE)


@pytest.mark.usefixtures("_host_is_apart")
def test_the_stream_of_copies_allocates_nothing_that_the_compute_stream_reads(
    alone: ProcessGroupCollection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All steps use one stream, so that copies of two steps never overlap."""
    run = Run(alone, overlap_cpu_optimizer_d2h_h2d=True, **OFFLOAD)  # without gradient buffers
    streams: list[object] = []
    inside: list[object] = []
    zeros_like = torch.zeros_like

    def side_stream() -> object:
        streams.append(object())
        return streams[-1]

    @contextlib.contextmanager
    def on_stream(stream: object) -> Iterator[None]:
        inside.append(stream)
        yield
        inside.pop()

    def checked(*args: Any, **options: Any) -> Tensor:
        assert not inside, "the compute stream does not wait for this stream to write zeros"
        return zeros_like(*args, **options)

    monkeypatch.setattr(device, "side_stream", side_stream)
    monkeypatch.setattr(device, "on_stream", on_stream)
    for name in ("wait_stream", "join_stream"):
        monkeypatch.setattr(device, name, lambda stream: None)
    monkeypatch.setattr(torch, "zeros_like", checked)
    for _ in range(2):
        run.optimizer.zero_grad()  # all gradients are missing
        run.optimizer.step()
    assert len(streams) == 1


def test_a_fraction_is_filled_in_order_and_never_exceeded():
    assert chosen([4, 4, 1, 1], 0.5) == [True, False, True, False]
    assert chosen([3, 2], 1.0) == [True, True]
    assert chosen([3, 2], 0.0) == [False, False]


def test_updates_begin_while_others_travel():
    class Place:
        main = torch.empty(2**23, device="meta")

    places: Any = [Place()] * 5
    assert [len(b) for b in batches(places, is_overlapped=True)] == [2, 2, 1]
    assert [len(b) for b in batches(places, is_overlapped=False)] == [5]
