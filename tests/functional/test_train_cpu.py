"""The benchmark of training on a CPU, at a size that is none."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from benchmarks import train_cpu


def test_a_contender_whose_package_is_missing_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "litgpt.py").write_text("raise ImportError('no litgpt here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    args = argparse.Namespace(
        shape="tiny-llama", dtype="bf16", steps=1, threads=1, rounds=1, compared=1, output=None
    )
    found = train_cpu.measure(args, ("litgpt", "floor"))
    train_cpu.report(args, found)
    out = capsys.readouterr().out
    assert out.startswith("litgpt is left out: no litgpt here\n")
    assert [*found] == ["floor"]
    assert "floor  " in out
