"""The one file that knows devices."""

from __future__ import annotations

import pytest
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


@pytest.mark.feature("Logging: memory in use on a CPU too, under the same tags")
def test_the_memory_of_a_process_on_the_cpu_is_what_it_has() -> None:
    before = device.memory_stats()
    held = torch.ones(2**26)
    after = device.memory_stats()
    assert after["allocated"] - before["allocated"] > 0.9 * held.nbytes
    assert after["max_allocated"] >= after["allocated"] == after["reserved"]


def test_a_failed_allocation_on_a_gpu_leaves_a_snapshot(monkeypatch):
    """--record-memory-history; test_memory_history.py has the real one."""
    observers, written = [], []
    monkeypatch.setattr(device, "_has_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **_: None)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", written.append)
    name = "_cuda_attach_out_of_memory_observer"
    monkeypatch.setattr(torch._C, name, observers.append, raising=False)
    device.record_memory_history("oom_rank-3_snapshot.pickle")
    assert written == []
    observers[0](0, 2**20, 2**30, 0)
    assert written == ["oom_rank-3_snapshot.pickle"]
