"""The barrier of a group runs on the device of this process."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron.core import device
from megatron.core.diagnostics.timers import Timers


@pytest.mark.parametrize(
    ("backend", "expected"),
    [("nccl", mock.call(group=None, device_ids=[3])), ("gloo", mock.call(group=None))],
)
def test_torch_does_not_guess_the_gpu_of_a_barrier(
    monkeypatch: pytest.MonkeyPatch, backend: str, expected: object
) -> None:
    begun = mock.Mock()
    monkeypatch.setattr(device, "current", lambda: torch.device("cuda", 3))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr(dist, "get_backend", lambda group=None: backend)
    monkeypatch.setattr(dist, "barrier", begun)
    Timers(0, "max")("step", log_level=0).start(barrier=True)
    assert begun.mock_calls == [expected]
