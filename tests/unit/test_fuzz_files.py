"""A few damaged and forged files of each kind; `make fuzz-files N=5000` is a longer run."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.config.errors import DataError
from tests.support.file_fuzz import files
from tests.support.file_fuzz.files import FAILURES, TARGETS, Fuzzer
from tests.support.file_fuzz.targets import Change, Target

CASES = 6


@pytest.mark.feature("Files: damaged and forged ones of every kind are refused by one message")
@pytest.mark.parametrize("name", TARGETS)
def test_a_damaged_file_is_refused_or_read_as_before(tmp_path: Path, name: str) -> None:
    if name in ("yaml", "recipe"):
        pytest.importorskip("yaml")
    if name == "tokenizer.json":
        pytest.importorskip("tokenizers")
    fuzzer = Fuzzer(TARGETS[name], tmp_path)
    for seed in range(CASES):
        fuzzer.run(seed)
    print(fuzzer.score.outcomes)
    assert fuzzer.score.failed == []


def test_a_seed_repeats_a_case(tmp_path: Path) -> None:
    contents = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        fuzzer = Fuzzer(TARGETS["per-split"], folder)
        for seed in range(8):
            fuzzer.run(seed)
            file = folder / "work" / "split.json"
            contents.append(file.read_bytes() if file.is_file() else b"")
    assert contents[:8] == contents[8:]
    assert len(set(contents)) > 4


def outcome_of(tmp_path: Path, read: Any, *, strict: str = "all") -> str:
    def make(root: Path) -> None:
        (root / "file").write_text("7")

    def change(root: Path, rng: Any) -> Change:
        (root / "file").write_text("8")
        return Change("another number", strict)

    def reader(root: Path) -> dict[str, Any]:
        text = (root / "file").read_text()
        return {"number": text} if text == "7" else read(root)

    shutil.rmtree(tmp_path / "fuzz", ignore_errors=True)
    return Fuzzer(Target("x", make, reader, change), tmp_path / "fuzz").run(0)


def test_the_fuzzer_finds_every_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "SECONDS", 0.2)

    def refuse(root: Path) -> Any:
        raise DataError(f"{root / 'file'} is damaged")

    def refuse_without_a_name(root: Path) -> Any:
        raise DataError("it is damaged")

    def fail(root: Path) -> Any:
        raise KeyError("x")

    def run_on(root: Path) -> Any:
        while True:
            pass

    def take_much(root: Path) -> Any:
        return torch.zeros(1 << 40)

    assert outcome_of(tmp_path, refuse) == "refused"
    assert outcome_of(tmp_path, lambda root: {"number": "7"}) == "loaded"
    assert outcome_of(tmp_path, lambda root: {"number": "8"}, strict="none") == "loaded"
    found = [
        outcome_of(tmp_path, fail),
        outcome_of(tmp_path, run_on),
        outcome_of(tmp_path, lambda root: {"number": "8"}),
        outcome_of(tmp_path, take_much),
        outcome_of(tmp_path, refuse_without_a_name),
    ]
    assert found == list(FAILURES)
