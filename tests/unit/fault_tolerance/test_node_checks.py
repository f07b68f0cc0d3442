"""Checks of a node: each ends in bounded time and detects the fault it is for."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tools.lib import node_checks
from tools.lib.node_checks import problem_of


def test_a_healthy_device_computes_right_products() -> None:
    assert problem_of(node_checks.matmul, 60) is None
    assert problem_of(node_checks.gpu_health, 60) is None


def test_a_result_that_is_wrong_once_makes_the_device_faulty(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FAULTS", "check.matmul:bitflip:times1")
    expected = "the product of two matrices is wrong: the device is faulty"
    assert problem_of(node_checks.matmul, 60) == f"ArithmeticError: {expected}"


def test_the_disk_is_written_and_read_back(tmp_path: Path) -> None:
    node_checks.disk(tmp_path, 3)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("bitflip", "OSError: .* returns other bytes than were written"),
        ("enospc", "OSError: .*No s"),
    ],
)
def test_a_faulty_disk_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, why: str
) -> None:
    monkeypatch.setenv("FAULTS", f"check.disk:{kind}")
    problem = problem_of(lambda: node_checks.disk(tmp_path, 1), 60)
    assert problem is not None
    assert re.match(why, problem)
    assert list(tmp_path.iterdir()) == []


def test_a_check_that_hangs_is_a_problem() -> None:
    release = threading.Event()
    assert problem_of(lambda: release.wait() and None, 0.05) == "no result within 0 s"
    release.set()


class FakeNvml:
    """NVML of a GPU whose ``readings`` a test sets; other readings are not supported."""

    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_VOLATILE_ECC = 0
    nvmlClocksThrottleReasonHwSlowdown = 8
    nvmlClocksThrottleReasonHwThermalSlowdown = 64
    nvmlClocksThrottleReasonHwPowerBrakeSlowdown = 128

    class NVMLError_NotSupported(Exception):  # noqa: N801, N818
        pass

    def __init__(self, **readings: Any) -> None:
        self.readings = readings

    def __getattr__(self, name: str) -> Any:
        def read(handle: object, *arguments: int) -> Any:
            if name.removeprefix("nvmlDeviceGet") not in self.readings:
                raise self.NVMLError_NotSupported
            return self.readings[name.removeprefix("nvmlDeviceGet")]

        return read


def test_faults_that_nvml_reports_are_found() -> None:
    assert node_checks.gpu_faults(FakeNvml(), SimpleNamespace()) == []
    healthy = FakeNvml(TotalEccErrors=0, RemappedRows=(3, 0, 0, 0), CurrentClocksThrottleReasons=4)
    assert node_checks.gpu_faults(healthy, SimpleNamespace()) == []
    faulty = FakeNvml(TotalEccErrors=2, RemappedRows=(0, 1, 1, 0), CurrentClocksThrottleReasons=72)
    first, second, third = node_checks.gpu_faults(faulty, SimpleNamespace())
    assert first == "2 uncorrected memory errors since the start of the driver"
    assert "remapped" in second
    assert "slows the clock down" in third
