"""The rate that MFU is a share of: what one device could multiply at most.

For known GPUs it is the maker's number for dense bfloat16 (without sparsity).  For other devices,
the CPU among them, a matrix product is timed once.
"""

from __future__ import annotations

import time
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
_GEMM_SIZE_GPU = 8192
_GEMM_SIZE_CPU = 1024


@dataclass(frozen=True)
class Peak:
    """Most FLOP/s of one device, and where the number is from."""

    flops_per_s: float
    source: str


def device_peak(dtype: torch.dtype) -> Peak:
    """The peak of this process's device; ``dtype`` is used where it has to be measured."""
    name = device.name()
    known = known_peak(name)
    if known is not None:
        return Peak(known, f"dense bf16 peak of {name}")
    size = _GEMM_SIZE_GPU if device.is_cuda() else _GEMM_SIZE_CPU
    if dtype == torch.float16 and not device.is_cuda():
        dtype = torch.float32  # few CPUs multiply in half precision
    kind = str(dtype).removeprefix("torch.")
    return Peak(
        measured_gemm_rate(dtype, size), f"measured rate of a {size}^3 {kind} product on {name}"
    )


def known_peak(name: str) -> float | None:
    """Dense bf16 FLOP/s of the GPU called ``name``, None if it is not in the table."""
    return next((peak for part, peak in _DENSE_BF16 if part in name), None)


def measured_gemm_rate(dtype: torch.dtype, size: int, repeats: int = 3) -> float:
    """FLOP/s of the fastest of ``repeats`` square matrix products, after one to warm up."""
    a = torch.randn(size, size, device=device.current()).to(dtype)  # zeros would be faster
    best_s = float("inf")
    for repeat in range(repeats + 1):
        device.synchronize()
        started_at_s = time.perf_counter()
        torch.mm(a, a)
        device.synchronize()
        if repeat:
            best_s = min(best_s, time.perf_counter() - started_at_s)
    return 2 * size**3 / best_s
