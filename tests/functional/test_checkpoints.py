"""Checkpoints of whole runs: in the background, failing, few of them."""

from __future__ import annotations

import functools
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron.core.dist_checkpointing.folders import TRACKER, choose
from megatron.core.dist_checkpointing.reader import CheckpointReader
from megatron.training.checkpointing.non_persistent import SUBFOLDER
from tests.support import runs
from tests.support.ranks import run_ranks
from tests.support.runs import SIX_STEPS, heard, losses, train_gpt

run_gpt = functools.partial(runs.run_gpt, base=SIX_STEPS)

STEP = re.compile(r"iteration +(\d+)/")
SCHEDULED = re.compile(r"  scheduled an async checkpoint save at iteration +(\d+) to")
SAVED = re.compile(r"  successfully saved checkpoint from iteration +(\d+) to")


def places(pattern: re.Pattern[str], lines: list[str]) -> dict[int, int]:
    """Iteration -> number of the line that speaks of it."""
    found = ((pattern.search(line), i) for i, line in enumerate(lines))
    return {int(match[1]): i for match, i in found if match}


def saved(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in folder.glob("iter_*"))


def saving(folder: Path, *flags: str, every: int = 2) -> list[str]:
    root = str(folder / "ck")
    return ["--save", root, "--load", root, "--save-interval", str(every), *flags]


@pytest.mark.feature("Checkpoints: written in the background while training goes on")
def test_a_save_in_the_background_is_called_saved_when_it_is_on_disk(tmp_path: Path) -> None:
    argv = [*SIX_STEPS, *saving(tmp_path, "--async-save")]
    lines, _ = run_ranks(heard, 1, argv)[0]
    scheduled, done, steps = (places(p, lines) for p in (SCHEDULED, SAVED, STEP))
    assert list(scheduled) == [2, 4, 6]
    assert list(done) == [2, 4, 6]
    for iteration in (2, 4):  # one step at least was made before all ranks knew
        assert scheduled[iteration] < steps[iteration + 1] < done[iteration]
    assert (tmp_path / "ck" / TRACKER).read_text() == "6"
    assert saved(tmp_path / "ck") == [2, 4, 6]


@pytest.mark.parametrize("fault", ["save.tensor:kill:step4", "save.after_rename:kill:step4"])
def test_a_kill_in_the_background_costs_no_more_than_that_checkpoint(
    tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = losses(run_gpt(tmp_path / "straight"))
    flags = saving(tmp_path, "--async-save")
    monkeypatch.setenv("FAULTS", fault)
    with pytest.raises(AssertionError, match="SIGKILL"):
        run_gpt(tmp_path / "killed", *flags)
    monkeypatch.delenv("FAULTS")
    newest = choose(tmp_path / "ck")
    assert newest is not None
    assert newest.found.iteration == (4 if "rename" in fault else 2)
    resumed = losses(run_gpt(tmp_path / "killed", *flags))
    assert resumed[-2:] == straight[-2:]


@pytest.mark.feature("Checkpoints: an exception that ends a run lets a save finish")
@pytest.mark.parametrize("culprit", [None, 0, 1])
def test_a_save_in_the_background_is_finished_when_an_exception_ends_the_run(
    tmp_path: Path, culprit: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody asks after the save of step 4 before step 5 fails."""
    world_size = 1 if culprit is None else 2
    monkeypatch.setenv("FAULTS", f"step.before:raise:step5:rank{culprit or 0}")
    with pytest.raises(AssertionError, match=r"exit code 1|InjectedFault"):
        run_gpt(tmp_path, *saving(tmp_path, "--async-save"), world_size=world_size)
    assert (tmp_path / "ck" / TRACKER).read_text() == "4"
    assert saved(tmp_path / "ck") == [2, 4]
    with CheckpointReader(tmp_path / "ck" / "iter_0000004") as reader:
        assert all(reader.read(key).isfinite().all() for key in reader.tensors)
        assert len(reader.manifest.files) == 3 + 2 * world_size


def test_the_stall_is_logged(tmp_path: Path) -> None:
    metrics = run_gpt(tmp_path, *saving(tmp_path, "--async-save"))
    stalls = {line["iteration"]: line.get("save-checkpoint-time") for line in metrics}
    assert [i for i, stall_s in stalls.items() if stall_s is not None] == [3, 5]


@pytest.mark.parametrize(("when_busy", "expected"), [("wait", [1, 2, 3, 4, 5, 6]), ("skip", None)])
def test_a_save_that_comes_too_early_waits_or_is_left_out(
    tmp_path: Path, when_busy: str, expected: list[int] | None
) -> None:
    flags = saving(tmp_path, "--async-save", "--async-save-when-busy", when_busy, every=1)
    ((lines, _),) = run_ranks(heard, 1, [*SIX_STEPS, *flags])
    if expected is not None:
        assert saved(tmp_path / "ck") == expected
        return
    note = (
        "NOTE: iteration 2 is not saved: the checkpoint of iteration 1 is still being written "
        "(--async-save-when-busy skip)"
    )
    assert note in lines
    kept = saved(tmp_path / "ck")
    assert kept[0] == 1
    assert 2 not in kept
    assert kept[-1] == 6


@pytest.mark.feature("Checkpoints: training survives saves that fail, as many as allowed")
@pytest.mark.parametrize("how", [[], ["--async-save"]])
def test_training_goes_on_after_a_failed_save_until_there_are_too_many(
    tmp_path: Path, how: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAULTS", "save.tensor:enospc:rank1:step2,save.written:raise:step4")
    flags = saving(tmp_path, *how)
    lines, complaint = run_ranks(heard, 2, [*SIX_STEPS, *flags, "--ckpt-max-failed-saves", "2"])[0]
    assert complaint == ""
    warnings = [line for line in lines if line.startswith("WARNING: the checkpoint of iteration")]
    assert len(warnings) == 2
    assert "rank 1: [Errno 28] No space left" in warnings[0]
    assert "it is failed save 1 in a row, --ckpt-max-failed-saves is 2" in warnings[0]
    assert list(places(SAVED, lines)) == [6]
    assert saved(tmp_path / "ck") == [6]
    monkeypatch.setenv("FAULTS", "save.tensor:enospc:rank1:step8")
    more = ["--train-iters", "12", "--override-opt_param-scheduler"]
    with pytest.raises(AssertionError, match="exit code 1"):
        run_ranks(heard, 2, [*SIX_STEPS, *flags, *more, "--ckpt-max-failed-saves", "0"])
    assert saved(tmp_path / "ck") == [6]


def train_without_output(rank: int, world_size: int, argv: Sequence[str], kind: str) -> None:
    """Standard output on a full disk, or in a pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(os.open("/dev/full", os.O_WRONLY) if kind == "full" else writer, 1)
    train_gpt(rank, world_size, argv)


@pytest.mark.feature("Logging: a log that cannot be written to never ends a run")
@pytest.mark.parametrize("kind", ["full", "nobody reads"])
def test_a_run_outlives_its_output(tmp_path: Path, kind: str) -> None:
    run_ranks(train_without_output, 1, [*SIX_STEPS, *saving(tmp_path, every=6)], kind)
    assert saved(tmp_path / "ck") == [6]


@pytest.mark.feature("Checkpoints: short-lived ones between those that are kept")
def test_a_killed_run_goes_on_from_the_newest_short_lived_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = losses(run_gpt(tmp_path / "straight"))
    between = ["--non-persistent-save-interval", "1", "--non-persistent-ckpt-type", "global"]
    flags = saving(tmp_path, *between, every=3)
    monkeypatch.setenv("FAULTS", "step.before:kill:step6")
    with pytest.raises(AssertionError, match="SIGKILL"):
        run_gpt(tmp_path / "killed", *flags)
    monkeypatch.delenv("FAULTS")
    assert saved(tmp_path / "ck") == [3]
    assert saved(tmp_path / "ck" / SUBFOLDER) == [5]
    ((lines, _),) = run_ranks(heard, 1, [*SIX_STEPS, *flags])
    assert f"NOTE: {tmp_path / 'ck'}: loading the non-persistent checkpoint" in "\n".join(lines)
    assert list(places(STEP, lines)) == [6]
    assert f"lm loss: {straight[-1]:.6E}" in "\n".join(lines)
    assert saved(tmp_path / "ck") == [3, 6]


def test_a_killed_run_goes_on_from_its_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = losses(run_gpt(tmp_path / "straight", world_size=2))
    place = ["--non-persistent-ckpt-type", "local", "--non-persistent-local-ckpt-dir"]
    flags = saving(tmp_path, *place, str(tmp_path / "node"), "--async-save", every=3)
    flags += ["--non-persistent-save-interval", "1", "--replication", "--replication-jump", "1"]
    monkeypatch.setenv("FAULTS", "step.before:kill:step6:rank1")
    with pytest.raises(AssertionError, match="SIGKILL"):
        run_gpt(tmp_path / "killed", *flags, world_size=2)
    monkeypatch.delenv("FAULTS")
    for rank in range(2):
        assert saved(tmp_path / "node" / f"rank_0000{rank}") == [5]
    resumed = run_gpt(tmp_path / "killed", *flags, world_size=2)
    assert losses(resumed)[-1] == straight[-1]
    assert resumed[-1]["consumed_samples"] == 48
    assert saved(tmp_path / "ck") == [3, 6]


def test_a_damaged_short_lived_checkpoint_is_passed_over(tmp_path: Path) -> None:
    between = ["--non-persistent-save-interval", "5", "--non-persistent-ckpt-type", "global"]
    flags = saving(tmp_path, *between, every=3)
    run_gpt(tmp_path, *flags, "--train-iters", "5", "--override-opt_param-scheduler")
    shutil.rmtree(tmp_path / "ck" / "iter_0000005")
    (tmp_path / "ck" / TRACKER).write_text("3")
    folder = tmp_path / "ck" / SUBFOLDER / "iter_0000005"
    os.utime(tmp_path / "ck" / TRACKER, ns=(0, 0))
    data = folder / "__0_0.safetensors"
    data.write_bytes(data.read_bytes()[:-1] + b"x")
    ((lines, _),) = run_ranks(heard, 1, [*SIX_STEPS, *flags, "--override-opt_param-scheduler"])
    assert any("is damaged" in line and "trying the checkpoint before" in line for line in lines)
    assert list(places(STEP, lines)) == [4, 5, 6]


@pytest.mark.feature("Checkpoints: only the newest N are kept, and multiples of K")
def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    flags = saving(tmp_path, "--keep-last-checkpoints", "2", every=1)
    ((lines, _),) = run_ranks(heard, 1, [*SIX_STEPS, *flags, "--save-retain-interval", "3"])
    assert saved(tmp_path / "ck") == [3, 5, 6]
    deleted = [line for line in lines if line.startswith("  successfully deleted checkpoint")]
    assert [int(line.split("iteration")[1].split()[0]) for line in deleted] == [1, 2, 4]
