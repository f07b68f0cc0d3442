"""Checks of this rank's device and disk before a run (tools/check_node.py), each in bounded time.

A check runs in a thread of its own: if a disk or a device hangs, the rank reports that and goes on.
Nothing communicates, so a faulty node does not disturb the checks of others.
"""

from __future__ import annotations

import contextlib
import os
import platform
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron.core import device
from megatron.core.diagnostics.fault_injection import fault_point, flip_bit
from megatron.core.optional import available, require

_ROUNDS = 3  # of the matmul, so that a device that is wrong now and then is found
_MIB = 2**20


def problem_of(check: Callable[[], None], limit_s: float) -> str | None:
    """Return why ``check`` fails, None if it succeeds within ``limit_s``.

    A check that hangs stays in its thread: end the process with ``os._exit``.
    """
    problem: str | None = f"no result within {limit_s:.0f} s"

    def run() -> None:
        nonlocal problem
        device.use_in_this_thread()
        try:
            check()
            problem = None
        except (RuntimeError, OSError, ArithmeticError, ValueError) as error:
            problem = f"{type(error).__name__}: {str(error).splitlines()[0]}"

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(limit_s)
    return problem


def matmul() -> None:
    """Raise ArithmeticError if the device computes a wrong product, compared with the CPU.

    The factors are -1, 0 and 1, mostly 0: every sum of products is exact in bf16, in any order.
    """
    size = 4096 if device.is_cuda() else 512
    drawn = torch.randint(8, (size, size), generator=torch.Generator().manual_seed(0))
    exact = (drawn == 0).float() - (drawn == 1).float()
    right = (exact @ exact).bfloat16()
    factor = exact.to(device.current(), torch.bfloat16)
    for _ in range(_ROUNDS):
        product = (factor @ factor).cpu()
        is_flipped = fault_point("check.matmul") == "bitflip"
        if is_flipped or not torch.equal(product, right):
            raise ArithmeticError("the product of two matrices is wrong: the device is faulty")


def disk(folder: Path, num_mib: int) -> None:
    """Write a file in ``folder`` and read it.

    Raises OSError, also if the file has other bytes than were written.
    """
    data = os.urandom(_MIB) * num_mib
    path = folder / f".check_node.{platform.node()}.{os.getpid()}"
    try:
        is_flipped = fault_point("check.disk") == "bitflip"
        with open(path, "wb") as file:
            file.write(flip_bit(data) if is_flipped else data)
            file.flush()
            os.fsync(file.fileno())
            with contextlib.suppress(OSError):  # read from the disk, not from memory
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        found = path.read_bytes()
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
    if found != data:
        raise OSError(f"{folder} returns other bytes than were written")


def gpu_health() -> None:
    """Raise RuntimeError if NVML reports a fault of this rank's GPU."""
    if not device.is_cuda() or not available("pynvml"):
        return
    nvml: Any = require("pynvml", "check_node")
    nvml.nvmlInit()
    handle = nvml.nvmlDeviceGetHandleByUUID(device.uuid())
    if faults := gpu_faults(nvml, handle):
        raise RuntimeError("; ".join(faults))


def gpu_faults(nvml: Any, handle: Any) -> list[str]:
    """Return the faults that NVML reports of a GPU."""

    def read(quantity: str, *arguments: int) -> Any:
        try:
            return getattr(nvml, f"nvmlDeviceGet{quantity}")(handle, *arguments)
        except nvml.NVMLError_NotSupported:
            return 0

    uncorrected = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
    volatile = nvml.NVML_VOLATILE_ECC
    slowdown = (
        nvml.nvmlClocksThrottleReasonHwSlowdown
        | nvml.nvmlClocksThrottleReasonHwThermalSlowdown
        | nvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown
    )
    faults = []
    if errors := read("TotalEccErrors", uncorrected, volatile):
        faults.append(f"{errors} uncorrected memory errors since the start of the driver")
    rows = read("RemappedRows")
    if rows and (rows[2] or rows[3]):
        faults.append("memory rows wait for a reset to be remapped, or cannot be remapped")
    if read("CurrentClocksThrottleReasons") & slowdown:
        faults.append("the hardware slows the clock down (temperature or power)")
    return faults
