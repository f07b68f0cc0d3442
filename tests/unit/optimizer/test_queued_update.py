"""An update is queued before the host reads the gradient norm, if the device can decide on it."""

from __future__ import annotations

import copy
import math
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from megatron.core import device
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import gradient_divisor
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.rerun import state_machine
from megatron.core.rerun.results import RerunErrorInjector, RerunMode
from megatron.core.rerun.state_machine import PassRejected, RerunStateMachine
from tests.support import tolerances

QUEUED, READ_FIRST = ["update", "read"], ["read", "update"]


class Run:
    """A linear layer, its optimizer, and the order of its update and of the host's read."""

    def __init__(self, groups: ProcessGroupCollection, **flags: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(40, 8, dtype=flags.pop("dtype", torch.float32))
        config = OptimizerConfig(lr=1e-2, **flags)
        self.optimizer = get_megatron_optimizer(config, [self.model], pg_collection=groups)
        self.order: list[str] = []
        update = self.optimizer._update
        self.optimizer._update = lambda *args: self.order.append("update") or update(*args)

    def step(self, machine: RerunStateMachine, value: float = 1.0) -> Any:
        """Give gradients and update."""
        for param in self.model.parameters():
            param.grad = torch.full_like(param, value)
        read = machine.read_squared_norm
        with (
            mock.patch.object(state_machine, "_machine", machine),
            mock.patch.object(
                machine, "read_squared_norm", lambda sent: self.order.append("read") or read(sent)
            ),
        ):
            return self.optimizer.step()

    def state(self) -> dict[str, Any]:
        """Return everything that an update changes."""
        return copy.deepcopy({**self.model.state_dict(), **self.optimizer.state_dict()})


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_update_is_queued_before_the_norm_is_read(
    alone: ProcessGroupCollection, optimizer: str, dtype: torch.dtype
) -> None:
    run = Run(alone, optimizer=optimizer, dtype=dtype, initial_loss_scale=4.0)
    assert run.step(RerunStateMachine())[0]
    assert run.order == QUEUED


@pytest.mark.parametrize("flags", [{"optimizer": "lion"}, {"log_num_zeros_in_grad": True}], ids=str)
def test_the_norm_is_read_first_where_the_host_needs_it(
    alone: ProcessGroupCollection, flags: dict[str, Any]
) -> None:
    run = Run(alone, **flags)
    assert run.step(RerunStateMachine())[0]
    assert run.order == READ_FIRST


def test_a_rerun_and_an_injected_error_are_judged_before_the_update(
    alone: ProcessGroupCollection,
) -> None:
    run = Run(alone)
    run.step(RerunStateMachine())
    machine = RerunStateMachine(mode=RerunMode.VALIDATE_RESULTS)
    assert machine.should_run_forward_backward(None)
    machine.validate_result(1.0, lambda _: True)
    before = run.state()
    with pytest.raises(PassRejected):
        run.step(machine)
    assert run.order == QUEUED * 2  # the device knows that this rank asks for a rerun
    torch.testing.assert_close(run.state(), before, **tolerances.BITWISE)
    assert machine.should_run_forward_backward(None)
    machine.validate_result(2.0, lambda _: True)
    assert not machine.judges_by_norm
    injecting = RerunStateMachine(
        mode=RerunMode.VALIDATE_RESULTS, error_injector=RerunErrorInjector(1000)
    )
    assert injecting.should_run_forward_backward(None)
    assert not injecting.judges_by_norm


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_queued_update_of_a_norm_that_is_not_finite_changes_nothing(
    alone: ProcessGroupCollection, optimizer: str, dtype: torch.dtype, value: float
) -> None:
    run = Run(alone, optimizer=optimizer, dtype=dtype, loss_scale=1.0)
    run.step(RerunStateMachine())
    before = run.state()
    assert run.step(RerunStateMachine(), value) == (False, None, None)
    assert run.order == QUEUED * 2
    torch.testing.assert_close(run.state(), before, **tolerances.BITWISE)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_torchs_kernels_change_nothing_where_the_device_decides(
    alone: ProcessGroupCollection, optimizer: str
) -> None:
    """As on a GPU, whose values the host does not read; the CPU's kernels take the same flag."""
    run = Run(alone, optimizer=optimizer)
    run.step(RerunStateMachine())
    before, rule = run.state(), run.optimizer.rule
    for param in run.model.parameters():
        param.grad = torch.full_like(param, float("nan"))
    rule.begin_step(torch.tensor(False))
    rule._found_inf = 1.0 - rule._accepted
    rule._accepted = None
    rule.step(2.0)
    torch.testing.assert_close(run.state(), before, **tolerances.BITWISE)


@pytest.mark.parametrize("scale", [1.0, 65536.0])
@pytest.mark.parametrize("max_norm", [0.0, 1e-3, 1.0, float("inf")])
def test_the_divisor_of_gradients_is_that_of_python(scale: float, max_norm: float) -> None:
    """To the last bits: the square root of torch is not always correctly rounded on a CPU (MKL)."""
    for squares in (torch.rand(100, dtype=torch.float64) * 10.0).unbind():
        norm = math.sqrt(squares) / scale
        coefficient = min(1.0, max_norm / (norm + 1.0e-6)) if max_norm > 0.0 else 1.0
        expected = pytest.approx(scale / coefficient, rel=1e-15)
        assert float(gradient_divisor(squares, scale, max_norm)) == expected


def test_weights_are_their_own_main_parameters_on_a_simulated_gpu(
    alone: ProcessGroupCollection,
) -> None:
    """A plan of memory counts what the GPU stores: two bytes beside each bf16 weight."""
    with device.simulate_device("cuda"):
        model = nn.Linear(40, 8, device="meta", dtype=torch.bfloat16)
        optimizer = get_megatron_optimizer(OptimizerConfig(lr=1.0), [model], pg_collection=alone)
        kept = optimizer.rule.state_of(optimizer.params[0].main)["main"]
    assert [t.dtype for t in kept.tensors] == [torch.int16]
