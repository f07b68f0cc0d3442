"""The measured peak: within its time."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

from megatron.training.estimates import peak_flops as module
from megatron.training.estimates.peak_flops import measured_gemm_rate

SIZES = (64, 128, 256, 512, 1024)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Callable[[], float]]:
    """A clock that only matmuls advance, at the rates given in turn (FLOP/s)."""

    def of(*rates: float) -> Callable[[], float]:
        now, rate = [0.0], itertools.cycle(rates)

        def mm(a: torch.Tensor, b: torch.Tensor) -> None:
            now[0] += 2 * a.shape[0] ** 3 / next(rate)

        monkeypatch.setattr(torch, "mm", mm)
        return lambda: now[0]

    return of


def test_a_slow_cpu_multiplies_small_matrices_only(machine) -> None:
    clock = machine(1e9)
    rate, size = measured_gemm_rate(torch.float32, SIZES, clock)
    assert rate == pytest.approx(1e9)
    assert size <= 128
    assert clock() <= module._BUDGET_S


def test_a_fast_one_uses_the_time_for_large_matrices(machine) -> None:
    clock = machine(1e12)
    measured_gemm_rate(torch.float32, SIZES, clock)
    assert clock() <= module._BUDGET_S
    assert clock() > 5 * 2 * 1024**3 / 1e12, "the largest was measured"
