"""One rank's exception ends all ranks, which say whose it was."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron.core.config.errors import DataError
from megatron.training.failure_watch import failure_watch
from tests.ranks import run_ranks


def _wait_while_rank_1_raises(
    rank: int, world_size: int, folder: str, error: Exception, agent_file: bool
) -> None:
    stderr = os.open(f"{folder}/stderr{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(stderr, 2)
    if agent_file:
        os.environ["TORCHELASTIC_ERROR_FILE"] = f"{folder}/error{rank}.json"
    with failure_watch(poll_s=0.05):
        if rank == 1:
            raise error
        dist.all_reduce(torch.ones(1))  # rank 1 never comes


@pytest.mark.feature("Running: an exception on one rank ends all ranks and is named")
def test_ranks_that_wait_in_a_collective_end_with_the_culprits_exception(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="exit code 1"):
        run_ranks(_wait_while_rank_1_raises, 3, str(tmp_path), ValueError("boom"), True)
    said = [(tmp_path / f"stderr{rank}").read_text().splitlines() for rank in range(3)]
    assert [lines[-1] for lines in said] == ["rank 1 failed: ValueError: boom"] * 3
    assert said[1][0].startswith("Traceback"), "the culprit shows where it was"
    for_launcher = json.loads((tmp_path / "error1.json").read_text())["message"]
    assert for_launcher["message"] == "rank 1 failed: ValueError: boom"
    assert for_launcher["extraInfo"]["py_callstack"] == "rank 1 failed: ValueError: boom"


def test_a_users_mistake_is_one_sentence_without_a_traceback(tmp_path: Path) -> None:
    error = DataError("--data-path x: no such file")
    with pytest.raises(AssertionError, match="exit code 1"):
        run_ranks(_wait_while_rank_1_raises, 2, str(tmp_path), error, False)
    expected = "rank 1 failed: DataError: --data-path x: no such file\n"
    assert (tmp_path / "stderr1").read_text() == expected
    assert (tmp_path / "stderr0").read_text() == expected


def test_a_long_message_leaves_the_rank_among_the_last_lines(tmp_path: Path) -> None:
    error = ValueError("caught in a worker\n" + "  a line\n" * 50 + "ValueError: boom\n")
    with pytest.raises(AssertionError, match="exit code 1"):
        run_ranks(_wait_while_rank_1_raises, 2, str(tmp_path), error, True)
    message = json.loads((tmp_path / "error1.json").read_text())["message"]["message"]
    lines = message.splitlines()
    assert lines[0] == "rank 1 failed: ValueError: caught in a worker"
    assert lines[-1] == "ValueError: boom"
    assert len(lines) <= 10
    assert (tmp_path / "stderr1").read_text().count("  a line") >= 50, "the traceback has all"


def _end_in_order(rank: int, world_size: int) -> str:
    with failure_watch(poll_s=0.05):
        dist.barrier()
    return "done"


def test_a_run_that_ends_in_order_is_left_alone() -> None:
    assert run_ranks(_end_in_order, 2) == ["done", "done"]


def test_one_process_raises_as_ever() -> None:
    with pytest.raises(ValueError, match="boom"), failure_watch():
        raise ValueError("boom")
