"""The one file that knows devices."""

from __future__ import annotations

import torch

from megatron.core import device


def test_nccl_does_not_serve_the_cpu() -> None:
    assert not device.backend_serves("cpu", "nccl")
    assert device.backend_serves("cpu", "gloo")
    assert device.backend_serves("cpu", None)
    assert device.backend_serves("auto", "nccl")


def test_bf16_sums_can_be_kept_in_fp32() -> None:
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction
    try:
        device.keep_bf16_sums_in_fp32()
        assert matmul.allow_bf16_reduced_precision_reduction is False
    finally:
        matmul.allow_bf16_reduced_precision_reduction = before
