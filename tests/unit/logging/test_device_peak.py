"""The measured peak: within its time, and only where it can be relied on."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

from megatron.training.callbacks.metrics import _announced
from megatron.training.estimates import peak_flops as module
from megatron.training.estimates.peak_flops import Peak, device_peak, measured_gemm_rate

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
    rate = measured_gemm_rate(torch.float32, SIZES, clock)
    assert rate.flops_per_s == pytest.approx(1e9)
    assert rate.size <= 128
    assert clock() <= module._BUDGET_S


def test_a_fast_one_uses_the_time_for_large_matrices(machine) -> None:
    clock = machine(1e12)
    measured_gemm_rate(torch.float32, SIZES, clock)
    assert clock() <= module._BUDGET_S
    assert clock() > 5 * 2 * 1024**3 / 1e12, "the largest was measured"


def test_mfu_is_omitted_where_repeats_differ(
    machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module.time, "perf_counter", machine(1e12, 2e11, 2e11, 3e11))
    monkeypatch.setattr(measured_gemm_rate, "__defaults__", (module.time.perf_counter,))
    assert _announced(device_peak(torch.float32)) is None
    said = capsys.readouterr().out
    assert said.startswith(" > MFU omitted: the measured rate of float32 matmuls on cpu varies by")


def test_a_reliable_peak_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    peak = Peak(2e12, "some source")
    assert _announced(peak) is peak
    assert "2 TFLOP/s per rank (some source)" in capsys.readouterr().out
