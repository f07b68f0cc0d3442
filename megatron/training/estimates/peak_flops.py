"""Peak FLOP/s of known GPUs, by which MFU divides: the manufacturer's value for dense bf16."""

from __future__ import annotations

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


def known_peak(name: str) -> float | None:
    """Return the dense bf16 FLOP/s of the GPU called ``name``, None if it is not known."""
    return next((peak for part, peak in _DENSE_BF16 if part in name), None)
