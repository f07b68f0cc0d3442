"""--record-memory-history: an allocation that fails leaves a snapshot."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch

from megatron.core import device


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs a GPU")
def test_an_allocation_that_fails_leaves_a_snapshot(tmp_path: Path) -> None:
    path = tmp_path / "oom_rank-0_snapshot.pickle"
    device.choose("cuda")
    device.record_memory_history(str(path))
    try:
        held = torch.empty(3 << 20, dtype=torch.uint8, device="cuda")
        assert not path.exists()
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    snapshot = pickle.loads(path.read_bytes())
    sizes = {event["size"] for trace in snapshot["device_traces"] for event in trace}
    assert held.numel() in sizes
