"""Peak FLOP/s of one device, by which MFU divides.

For known GPUs it is the manufacturer's value for dense bf16 (without sparsity).  For other devices,
CPUs included, GEMMs are timed for a tenth of a second.
"""

from __future__ import annotations

import statistics
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
_SPREAD = 1.3  # median over fastest repeat, above which a rate is not reliable


@dataclass(frozen=True)
class Peak:
    """Peak FLOP/s of one device, and where the value is from.

    ``problem`` is the reason why no MFU can be computed from it, None if it can.
    """

    flops_per_s: float
    source: str
    problem: str | None = None


def device_peak(dtype: torch.dtype) -> Peak:
    """Return the peak of this process's device; ``dtype`` is used if it has to be measured."""
    name = device.name()
    known = known_peak(name)
    if known is not None:
        return Peak(known, f"dense bf16 peak of {name}")
    if dtype == torch.float16 and not device.is_cuda():
        dtype = torch.float32  # few CPUs multiply in half precision
    kind = str(dtype).removeprefix("torch.")
    rate = measured_gemm_rate(dtype, _SIZES_GPU if device.is_cuda() else _SIZES_CPU)
    problem = None
    if rate.spread > _SPREAD:
        problem = (
            f"the measured rate of {kind} matmuls on {name} varies by a factor of "
            f"{rate.spread:.2g} between repeats; the machine is busy with other work"
        )
    return Peak(
        rate.flops_per_s, f"measured rate of a {rate.size}^3 {kind} matmul on {name}", problem
    )


def known_peak(name: str) -> float | None:
    """Return the dense bf16 FLOP/s of the GPU called ``name``, None if it is not known."""
    return next((peak for part, peak in _DENSE_BF16 if part in name), None)


@dataclass(frozen=True)
class GemmRate:
    """Rate of the fastest square matmul.  ``spread``: its median time over its fastest time."""

    flops_per_s: float
    size: int
    spread: float


def measured_gemm_rate(
    dtype: torch.dtype, sizes: Sequence[int], clock: Callable[[], float] = time.perf_counter
) -> GemmRate:
    """Time increasingly large matmuls until the time budget is used up.

    A larger one is started only if its repeats, at the rate of the previous size, fit into the
    budget: a CPU without bf16 instructions is 40 times slower than one with them.
    """
    began_s = clock()
    best: GemmRate | None = None
    flops_per_s = float("inf")
    for size in sizes:
        expected_s = (_REPEATS + 1) * 2 * size**3 / flops_per_s
        if best is not None and clock() - began_s + expected_s > _BUDGET_S:
            break
        a = torch.randn(size, size, device=device.current()).to(dtype)  # zeros would be faster
        times_s = []
        for _ in range(_REPEATS + 1):  # the first one warms up
            device.synchronize()
            started_at_s = clock()
            torch.mm(a, a)
            device.synchronize()
            times_s.append(clock() - started_at_s)
        fastest_s = min(times_s[1:])
        flops_per_s = 2 * size**3 / fastest_s
        if best is None or flops_per_s > best.flops_per_s:
            best = GemmRate(flops_per_s, size, statistics.median(times_s[1:]) / fastest_s)
    assert best is not None, "there is a first size"
    return best
