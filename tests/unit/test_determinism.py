"""--deterministic-mode on a GPU: its environment, and sums in a fixed order."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from megatron.core import device
from megatron.core.device import determinism

NCCL = {"NCCL_ALGO": "Ring"}


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    fills = torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = fills


def test_cublas_gets_workspaces_of_its_own_where_none_are_set() -> None:
    with device.simulate_device("cuda"):
        for given in ({}, {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}):
            environ = {**NCCL, **given}
            assert determinism.require(environ) == []
            assert environ == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", **NCCL, **given}
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.utils.deterministic.fill_uninitialized_memory


def test_the_environment_of_a_cpu_stays_as_it_is() -> None:
    environ: dict[str, str] = {}
    assert determinism.require(environ) == []
    assert not environ


def test_an_environment_that_is_not_deterministic_is_reported() -> None:
    with device.simulate_device("cuda"):
        nccl, cublas = determinism.require({"CUBLAS_WORKSPACE_CONFIG": ":0:0"})
    assert "NCCL_ALGO is None; set it to one of Tree, Ring" in nccl
    assert "CUBLAS_WORKSPACE_CONFIG is :0:0; set it to one of :4096:8, :16:8" in cublas


@pytest.mark.parametrize("size", [1, 2, 13, 64])
def test_a_sum_in_a_fixed_order_has_the_values_of_cumsum(size: int) -> None:
    x = torch.randn(3, size, 2, dtype=torch.float64, requires_grad=True)
    weights = torch.randn_like(x)
    (wanted,) = torch.autograd.grad((x.cumsum(1) * weights).sum(), x)
    torch.use_deterministic_algorithms(True)
    with device.simulate_device("cuda", without_memory=False):
        sums = determinism.cumulative_sum(x, 1)
        (grad,) = torch.autograd.grad((sums * weights).sum(), x)
    assert "Cumsum" not in str(sums.grad_fn)
    torch.testing.assert_close(sums, x.cumsum(1))
    torch.testing.assert_close(grad, wanted)
