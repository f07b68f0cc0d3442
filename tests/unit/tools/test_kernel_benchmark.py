"""benchmarks/kernels.py times the device, not the host that queues its work."""

from __future__ import annotations

import pytest

from benchmarks import kernels
from megatron.core import device


def test_work_is_queued_while_the_device_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    queued: list[str] = []
    clock_s = iter([0.0, 0.02, 1.0, 1.02])  # the host needs 20 ms, the first pause is of 10
    monkeypatch.setattr(device, "is_cuda", lambda: True)
    monkeypatch.setattr(device, "synchronize", lambda: queued.append("synchronize"))
    monkeypatch.setattr(kernels, "pause", lambda seconds: queued.append(f"pause {seconds}"))
    monkeypatch.setattr(device, "moment", lambda: queued.append("moment"))
    monkeypatch.setattr(device, "seconds_between", lambda begin, end: 0.003)
    monkeypatch.setattr(kernels.time, "perf_counter", lambda: next(clock_s))
    spent_ms = kernels.time_of(lambda: queued.append("work"), lambda: queued.append("prepare"))
    assert spent_ms == pytest.approx(3)
    turn = ["prepare", "synchronize", "pause", "moment", "work", "moment", "synchronize"]
    assert [word.split()[0] for word in queued] == turn * 2
    assert [word for word in queued if "pause" in word] == ["pause 0.01", "pause 0.04"]
