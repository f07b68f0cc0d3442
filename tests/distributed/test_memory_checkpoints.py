"""Checkpoints in host memory: runs that lose ranks or nodes resume from them."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megatron.core import process_memory
from megatron.training.checkpointing import non_persistent
from megatron.training.checkpointing.non_persistent import (
    FOLDER,
    check_host_memory,
    claim_memory,
    remove_memory,
)
from megatron.training.config.checkpoint import CheckpointConfig
from tests.support.ranks import run_ranks
from tests.support.runs import SIX_STEPS, losses, run_gpt, train_gpt

FLAGS = "--hidden-dropout 0.1 --non-persistent-ckpt-type in_memory --non-persistent-save-interval 2"
COPIES = "--replication --replication-jump 1"


@pytest.fixture
def memory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def flags(tmp_path: Path, memory: Path, *more: str) -> list[str]:
    place = ["--save", str(tmp_path / "ck"), "--load", str(tmp_path / "ck")]
    return [*FLAGS.split(), *place, "--non-persistent-local-ckpt-dir", str(memory), *more]


def train_on_a_node(rank: int, world_size: int, argv: list[str], memory: str) -> str:
    os.environ[FOLDER] = f"{memory}/node{rank}"
    with contextlib.redirect_stdout(io.StringIO()) as said:
        train_gpt(rank, world_size, argv)
    return said.getvalue()


@pytest.mark.feature("Checkpoints: in host memory, with copies on other nodes")
@pytest.mark.parametrize("is_node_lost", [False, True])
def test_a_killed_run_resumes_from_memory_with_the_same_losses_and_leaves_nothing(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch, is_node_lost: bool
) -> None:
    """A killed rank finds its part in memory; the copies replace the parts of a lost node."""
    unbroken = run_gpt(tmp_path, "--hidden-dropout", "0.1", base=SIX_STEPS, world_size=2)
    metrics = tmp_path / "resumed.jsonl"
    argv = [*SIX_STEPS, *flags(tmp_path, memory), "--metrics-file", str(metrics)]
    argv += COPIES.split() if is_node_lost else []
    monkeypatch.setenv("FAULTS", "step.before:kill:rank1:step5")
    with pytest.raises(AssertionError, match="SIGKILL"):
        run_ranks(train_on_a_node, 2, argv, str(memory))
    if is_node_lost:
        shutil.rmtree(memory / "node1")
    assert {p.name for p in memory.glob("*/rank_*/iter_*")} == {"iter_0000004"}
    monkeypatch.delenv("FAULTS")
    metrics.unlink()
    said = run_ranks(train_on_a_node, 2, argv, str(memory))[0]
    assert f"loading local checkpoint from {memory}/node0 at iteration 4" in said
    resumed = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert losses(resumed) == losses(unbroken)[4:]
    assert not list(memory.iterdir())


def config(**values: Any) -> CheckpointConfig:
    return CheckpointConfig(non_persistent_ckpt_type="in_memory", **values)


def test_two_runs_of_a_node_have_folders_of_their_own_and_unused_ones_are_deleted(
    tmp_path: Path, memory: Path
) -> None:
    first, second = (
        config(save=str(tmp_path / name), non_persistent_local_ckpt_dir=str(memory))
        for name in ("a", "b")
    )
    claim_memory(first)
    claim_memory(second)
    of_first = non_persistent.memory_folder(first)
    assert len(list(memory.iterdir())) == 2
    for path in (of_first, of_first / "lock"):
        os.utime(path, (0, 0))
    third = config(save=str(tmp_path / "c"), non_persistent_local_ckpt_dir=str(memory))
    claim_memory(third)
    assert of_first.exists(), "a process holds its lock"
    non_persistent._held.pop(of_first).close()
    remove_memory(third)
    claim_memory(third)
    assert not of_first.exists()
    remove_memory(second)
    remove_memory(third)
    assert not list(memory.iterdir())


def start_without_memory(rank: int, world_size: int, argv: list[str]) -> str:
    with (
        mock.patch.object(process_memory, "free_for_job", return_value=1000),
        contextlib.redirect_stderr(io.StringIO()) as said,
        pytest.raises(SystemExit),
    ):
        train_gpt(rank, world_size, argv)
    return said.getvalue()


def test_a_node_with_too_little_memory_is_refused_before_the_first_step(
    tmp_path: Path, memory: Path
) -> None:
    (said,) = run_ranks(start_without_memory, 1, [*SIX_STEPS, *flags(tmp_path, memory)])
    message = "--non-persistent-ckpt-type in_memory: in-memory checkpoints need up to 0.001 GB of"
    assert message in said


@pytest.mark.parametrize(
    ("jump", "copies", "expected"),
    [
        (1, 0, "24.000 GB of host memory on the node of ranks 2 to 3"),
        (2, 1, "30.000 GB of host memory on the node of ranks 0 to 1"),
        (1, 1, "28.000 GB of host memory on the node of ranks 2 to 3"),
    ],
)
def test_a_node_needs_memory_for_two_saves_of_each_part_that_it_stores(
    memory: Path, monkeypatch: pytest.MonkeyPatch, jump: int, copies: int, expected: str
) -> None:
    """Ranks 0 and 1 share a node, and ranks 2 and 3; rank r has a part of 2**r GB."""
    monkeypatch.setenv(FOLDER, str(memory))
    reports = [(node, 10**9 * 2**rank, 10**12) for rank, node in enumerate("aabb")]
    monkeypatch.setattr(non_persistent, "all_gather_json", lambda value, group: reports)
    flags = {"replication_jump": jump, "replication_factor": copies + 1}
    line = check_host_memory(config(replication=True, **flags), 0, None)  # type: ignore[arg-type]
    assert f"need up to {expected}" in line
