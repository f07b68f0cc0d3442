"""Runs whose program brings its own data loader (--dataloader-type external)."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.support import tolerances
from tests.support.ranks import run_ranks
from tests.support.runs import ROOT, TINY, losses, train_gpt

FLAGS = (
    "--dataloader-type external --eval-iters 0 --train-iters 4 --micro-batch-size 2 --mock-data"
).split()


class CountingLoader:
    """Endless micro-batches, each a function of its number; the state is the next number."""

    def __init__(self, state: dict[str, int] | None) -> None:
        self.next = 0 if state is None else state["next"]

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return self

    def __next__(self) -> dict[str, Tensor]:
        random = torch.Generator().manual_seed(self.next)
        self.next += 1
        tokens = torch.randint(0, 99, (2, 33), generator=random)
        positions = torch.arange(32).expand(2, -1)
        mask = torch.ones(2, 32)
        parts = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}
        return {**parts, "loss_mask": mask, "position_ids": positions}

    def save_state(self) -> dict[str, int]:
        return {"next": self.next}


def train(
    rank: int, world_size: int, argv: Sequence[str], state_file: str | None, has_state: bool
) -> None:
    """Train with a `CountingLoader`, restored from ``state_file`` by the program."""
    state = None
    if state_file is not None:
        state = torch.load(state_file, weights_only=True)["dataloader_state_dict"]

    def provider(_num_samples: Sequence[int]) -> tuple[Any, None, None]:
        loader = CountingLoader(state)
        return (loader if has_state else iter(loader.__next__, None)), None, None

    entry = importlib.import_module("pretrain_gpt")
    with mock.patch.object(entry, "train_valid_test_datasets_provider", provider):
        train_gpt(rank, world_size, argv)


def refused(rank: int, world_size: int, argv: Sequence[str]) -> str:
    """Return the error messages of a run whose loader has no state."""
    with contextlib.redirect_stderr(io.StringIO()) as heard, contextlib.suppress(SystemExit):
        train(rank, world_size, argv, None, False)
    return heard.getvalue()


def run(folder: Path, *flags: str, state_file: Path | None = None, ranks: int = 1) -> list[float]:
    folder.mkdir()
    log = folder / "metrics.jsonl"
    given = [*TINY, *FLAGS, "--metrics-file", str(log), *flags]
    run_ranks(train, ranks, given, state_file and str(state_file), True)
    return losses([json.loads(line) for line in log.read_text().splitlines()])


@pytest.mark.feature("Data: the state of an external loader is saved with each checkpoint")
def test_a_run_goes_on_with_the_state_of_its_loader(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole")
    saved = str(tmp_path / "ck")
    states = tmp_path / "states"
    stop = ["--save", saved, "--exit-interval", "2", "--dataloader-save", str(states)]
    first = run(tmp_path / "first", *stop)
    path = states / "iter_0000002" / "mp_rank_00" / "train_dataloader_dprank000.pt"
    assert torch.load(path, weights_only=True) == {"dataloader_state_dict": {"next": 8}}
    rest = run(tmp_path / "rest", "--load", saved, state_file=path)
    assert first + rest == whole


def test_slices_of_larger_tensors_reach_every_tensor_parallel_rank(tmp_path: Path) -> None:
    """The loader's tokens and labels are slices, whose memory has gaps."""
    whole = run(tmp_path / "whole")
    split = run(tmp_path / "split", "--tensor-model-parallel-size", "2", ranks=2)
    torch.testing.assert_close(torch.tensor(split), torch.tensor(whole), **tolerances.LAYOUT_LOSS)


def test_each_data_parallel_rank_saves_its_state_once(tmp_path: Path) -> None:
    layout = "--tensor-model-parallel-size 2 --save-interval 4".split()
    folders = ["--save", str(tmp_path / "ck"), "--dataloader-save", str(tmp_path / "states")]
    run(tmp_path / "run", *layout, *folders, ranks=4)
    found = sorted(p.name for p in (tmp_path / "states").rglob("*") if p.is_file())
    assert found == ["train_dataloader_dprank000.pt", "train_dataloader_dprank001.pt"]


def test_a_loader_without_state_is_refused(tmp_path: Path) -> None:
    given = [*TINY, *FLAGS, "--dataloader-save", str(tmp_path)]
    (said,) = run_ranks(refused, 1, given)
    assert "has no method save_state()" in said


def test_other_distributions_may_have_packages_under_megatron(tmp_path: Path) -> None:
    """Energon's package is megatron.energon."""
    package = tmp_path / "megatron" / "other_distribution"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("NAME = 'other'\n")
    script = "import megatron.training.config, megatron.other_distribution as o; print(o.NAME)"
    paths = os.pathsep.join((str(ROOT), str(tmp_path)))
    said = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": paths},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert said.stdout == "other\n", said.stderr
