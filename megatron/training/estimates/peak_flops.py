"""Peak FLOP/s of one device, by which MFU divides.

For known GPUs it is the manufacturer's value for dense bf16 (without sparsity).  For other devices,
CPUs included, GEMMs are timed for a tenth of a second.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from megatron.core import device

# FLOP/s, dense bf16 (fp16 where the chip has no bf16); the first name that is part of the
# device's name counts, so longer names come first.
_DENSE_BF16 = (
    ("GB300", 2500e12),
    ("GB200", 2500e12),
    ("B300", 2250e12),
    ("B200", 2250e12),
    ("GH200", 989.4e12),
    ("H200", 989.4e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835.5e12),
    ("H800", 989.4e12),
    ("H100", 989.4e12),
    ("H20", 148e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("A40", 149.7e12),
    ("A30", 165e12),
    ("A10", 125e12),
    ("L40S", 362e12),
    ("L40", 181e12),
    ("L4", 121e12),
    ("V100", 125e12),
    ("MI300X", 1307e12),
    ("MI250X", 383e12),
)
_SIZES_CPU = (64, 128, 256, 512, 1024)
_SIZES_GPU = (2048, 4096, 8192)
_BUDGET_S = 0.1  # of all measurements; a matmul that has begun is completed
_REPEATS = 5  # of each size


@dataclass(frozen=True)
class Peak:
    """Peak FLOP/s of one device, and where the value is from."""

    flops_per_s: float
    source: str


def device_peak(dtype: torch.dtype) -> Peak:
    """Return the peak of this process's device; ``dtype`` is used if it has to be measured."""
    name = device.name()
    known = known_peak(name)
    if known is not None:
        return Peak(known, f"dense bf16 peak of {name}")
    if dtype == torch.float16 and not device.is_cuda():
        dtype = torch.float32  # few CPUs multiply in half precision
    rate, size = measured_gemm_rate(dtype, _SIZES_GPU if device.is_cuda() else _SIZES_CPU)
    kind = str(dtype).removeprefix("torch.")
    return Peak(rate, f"measured rate of a {size}^3 {kind} matmul on {name}")


def known_peak(name: str) -> float | None:
    """Return the dense bf16 FLOP/s of the GPU called ``name``, None if it is not known."""
    return next((peak for part, peak in _DENSE_BF16 if part in name), None)


def measured_gemm_rate(
    dtype: torch.dtype, sizes: Sequence[int], clock: Callable[[], float] = time.perf_counter
) -> tuple[float, int]:
    """Return FLOP/s and size of the fastest square matmul of increasing ``sizes``.

    A larger one is started only if its repeats, at the rate of the previous size, fit into the
    time budget: a CPU without bf16 instructions is 40 times slower than one with them.
    """
    began_s = clock()
    best = (0.0, 0)
    expected_s = 0.0  # of all repeats, per cubed size
    for size in sizes:
        if clock() - began_s + expected_s * size**3 > _BUDGET_S:
            break
        a = torch.randn(size, size, device=device.current()).to(dtype)  # zeros would be faster
        times_s = []
        for _ in range(_REPEATS + 1):  # the first one warms up
            device.synchronize()
            started_at_s = clock()
            torch.mm(a, a)
            device.synchronize()
            times_s.append(clock() - started_at_s)
        rate = 2 * size**3 / min(times_s[1:])
        best = max(best, (rate, size))
        expected_s = (_REPEATS + 1) * 2 / rate
    return best
