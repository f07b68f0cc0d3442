"""Checks of a node: each ends in bounded time and detects the fault it is for."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.core.device import CPU
from megatron.training.fault_tolerance import node_checks
from megatron.training.fault_tolerance.node_checks import run_within

MIB = 2**20


def test_a_healthy_device_gives_the_same_bits_each_time() -> None:
    assert node_checks.device.current().type == CPU
    first = node_checks.matmul()
    second = node_checks.matmul()
    assert first["bits"] == second["bits"]
    assert first["matmul"] > 0
    assert node_checks.memory()["memory"] > 0
    assert node_checks.gpu_health() == {}


def test_a_bit_that_flips_once_makes_the_device_faulty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAULTS", "check.matmul:bitflip:times1")
    _, problem = run_within(60, "matmul", node_checks.matmul)
    expected = "equal computations give different bits: the device is faulty"
    assert problem == f"ArithmeticError: {expected}"


def test_the_disk_is_written_and_read_back(tmp_path: Path) -> None:
    assert set(node_checks.disk(tmp_path, 3 * MIB)) == {"disk write", "disk read"}
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
    found, problem = run_within(60, "disk", lambda: node_checks.disk(tmp_path, MIB))
    assert found == {}
    assert problem is not None
    assert re.match(why, problem)
    assert list(tmp_path.iterdir()) == []


def test_a_check_that_hangs_is_a_problem() -> None:
    release = threading.Event()

    def hang() -> dict[str, Any]:
        release.wait()
        return {}

    assert run_within(0.05, "disk", hang) == ({}, "no result within 0 s")
    _, problem = run_within(0.05, "clock", hang)
    assert problem is not None
    assert "is in no collective" in problem
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
    assert node_checks._gpu_faults(FakeNvml(), SimpleNamespace()) == []
    healthy = FakeNvml(TotalEccErrors=0, RemappedRows=(3, 0, 0, 0), CurrentClocksThrottleReasons=4)
    assert node_checks._gpu_faults(healthy, SimpleNamespace()) == []
    faulty = FakeNvml(TotalEccErrors=2, RemappedRows=(0, 1, 1, 0), CurrentClocksThrottleReasons=72)
    first, second, third = node_checks._gpu_faults(faulty, SimpleNamespace())
    assert first == "2 uncorrected memory errors since the start of the driver"
    assert "remapped" in second
    assert "slows the clock down" in third


def test_each_node_of_a_ring_is_in_one_pair_at_a_time() -> None:
    for count in range(2, 9):
        for phase in range(3):
            pairs = {
                frozenset((i, (i + 1) % count))
                for i in range(count)
                if node_checks._phase(i, count) == phase
            }
            nodes = [node for pair in pairs for node in pair]
            assert len(nodes) == len(set(nodes))
