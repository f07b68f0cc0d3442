"""One rank's exception ends all ranks, which say whose it was."""

from __future__ import annotations

import json
import os
import signal
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron.core.config.errors import DataError
from megatron.core.diagnostics.fault_injection import fault_point
from megatron.core.parallel.communicators import Communicators
from megatron.core.parallel.process_groups_config import create_process_groups, make_grids
from megatron.core.parallel.run_store import RunStore
from megatron.core.pipeline_parallel.microbatch import StepHooks
from megatron.core.pipeline_parallel.plan import Placement, Transfer, TransferBatch
from megatron.core.pipeline_parallel.transfer import Mailbox
from megatron.training.fault_tolerance.failure_watch import StallReport, failure_watch
from tests.support import ranks
from tests.support.ranks import run_ranks


def _speak_into(folder: str, rank: int) -> None:
    os.dup2(os.open(f"{folder}/stderr{rank}", os.O_WRONLY | os.O_CREAT), 2)


def _wait_while_rank_1_raises(
    rank: int, world_size: int, folder: str, error: Exception, agent_file: bool
) -> None:
    _speak_into(folder, rank)
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
    with pytest.raises(AssertionError, match="exit code 65"):
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


def _end_in_order_beside_a_stranger(rank: int, world_size: int) -> str:
    """Every key is overwritten that somebody who knows the code, but no secret, can name."""
    stranger = dist.distributed_c10d._get_default_store()
    keys = ("failure_watch/failure", "stall_report/called_for")
    with failure_watch(poll_s=0.01):
        for key in keys:
            stranger.set(key, "rank 0 failed: forged")
            RunStore(stranger, bytes(32)).set(key, "rank 0 failed: forged")
        for _ in range(20):
            dist.barrier()
    return "done"


def test_a_stranger_at_the_store_ends_nothing() -> None:
    assert run_ranks(_end_in_order_beside_a_stranger, 2) == ["done", "done"]


def _be_killed(rank: int, world_size: int, folder: str, where: str) -> None:
    """Rank 1 is killed; the others wait for it, or are busy for themselves."""
    _speak_into(folder, rank)
    with failure_watch(poll_s=0.05):
        dist.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if where == "in a collective":
            dist.all_reduce(torch.ones(1))
        threading.Event().wait()


@pytest.mark.feature("Running: a killed rank ends all ranks and is named, wherever they are")
@pytest.mark.parametrize("where", ["in a collective", "at work of their own"])
def test_a_killed_rank_is_named_by_the_others(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "GRACE_S", 30)  # the others end by themselves
    with pytest.raises(AssertionError, match="killed by signal 9"):
        run_ranks(_be_killed, 3, str(tmp_path), where)
    for rank in (0, 2):
        said = (tmp_path / f"stderr{rank}").read_text()
        assert "rank 1 failed: its process" in said, rank
        assert "has ended without a message" in said


def test_one_process_raises_as_ever() -> None:
    with pytest.raises(ValueError, match="boom"), failure_watch():
        raise ValueError("boom")


def _hang_on_rank_2(rank: int, world_size: int, folder: str) -> None:
    """Rank 2 never comes; 3 waits for it in tp, 0 and then 1 in dp."""
    communicators = Communicators(timeout=timedelta(seconds=1))
    groups = create_process_groups(*make_grids(4, tp=2), communicators=communicators)
    _speak_into(folder, rank)
    with failure_watch(poll_s=0.05, timeout_s=1):
        dist.all_reduce(torch.ones(1), group=groups.tp)
        fault_point("between.collectives", step=1)
        dist.all_reduce(torch.ones(1), group=groups.tp)
        work = dist.all_gather_into_tensor(
            torch.ones(2), torch.ones(1), group=groups.dp, async_op=True
        )
        work.wait()


@pytest.mark.feature("Running: a hang is named: which rank is where, and who waits for it in what")
def test_a_hang_names_the_group_the_operation_and_the_stack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAULTS", "between.collectives:hang:rank2:step1")
    with pytest.raises(AssertionError, match="exit code 1"):
        run_ranks(_hang_on_rank_2, 4, str(tmp_path))
    said = [(tmp_path / f"stderr{rank}").read_text() for rank in range(4)]
    assert "rank 0 waits in dp all_gather of ranks 0 2, call 1 (" in said[0]
    assert "rank 1 waits in dp all_gather of ranks 1 3, call 1 (" in said[1]
    assert (
        "rank 2 is in no collective; the last was tp all_reduce of ranks 2 3, call 1 (" in said[2]
    )
    assert "rank 3 waits in tp all_reduce of ranks 2 3, call 2 (" in said[3]
    assert "rank 2 began tp 1" in said[2]
    assert "rank 3 began tp 2" in said[3]
    hung = said[2].split("rank 2 stands in")[1]
    assert "in _hang_on_rank_2" in hung
    assert "in fault_point" in hung
    assert 'fault_point("between.collectives", step=1)' in hung
    first = next(text for text in said if "Traceback" in text)
    summary = first.split("Traceback")[1]
    for rank, text in enumerate(said):
        line = next(line for line in text.splitlines() if line.startswith(f"rank {rank} "))
        assert f"rank {rank}: {line.split(' ', 2)[2].rpartition(' (')[0]}" in summary


def _exchange_between_stages(rank: int, world_size: int, folder: str) -> None:
    pipeline = dist.new_group([0, 1], timeout=timedelta(seconds=1), group_desc="pp")
    _speak_into(folder, rank)
    with failure_watch(poll_s=0.05, timeout_s=1):
        mailbox = Mailbox(Placement(2), pipeline, StepHooks(), shapes=[(2,)], dtype=torch.float32)
        if rank == 0:
            transfer = Transfer("activation", 17, 0, 1)
            mailbox.put(transfer, torch.ones(2))
            mailbox.post(TransferBatch((transfer,), ()))
            mailbox.close()
        else:
            fault_point("stage")


def test_a_transfer_between_stages_is_named_with_its_microbatch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAULTS", "stage:hang:rank1")
    with pytest.raises(AssertionError, match="exit code 1"):
        run_ranks(_exchange_between_stages, 2, str(tmp_path))
    said = (tmp_path / "stderr0").read_text()
    assert "rank 0 waits in pp send 0->1, activation of microbatch 17, call 1" in said


def test_a_long_time_without_collectives_is_reported_once_and_ends_nothing(
    capfd: pytest.CaptureFixture[str],
) -> None:
    store = RunStore(dist.HashStore(), b"secret")
    report = StallReport(0, 1, timeout_s=0)
    report.poll(store)  # the first poll sees that something has moved
    report.poll(store)
    report.poll(store)
    said = capfd.readouterr().err
    assert said.count("rank 0 is in no collective; there was none") == 1
    assert "(nothing has moved for 0 s)" in said
    assert "in test_a_long_time_without_collectives" in said
    assert report.summary(store).startswith("rank 0: is in no collective; ")
