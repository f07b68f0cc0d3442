"""tools/launch.py restarts a run, and stops where a restart is pointless."""

from __future__ import annotations

import os
import select
import signal
from pathlib import Path

import pytest

from tests.support import selection
from tests.support.supervised import SupervisedRun


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> SupervisedRun:
    """A run without faults; the others must end with its numbers."""
    run = SupervisedRun(tmp_path_factory.mktemp("undisturbed"), forks=True).start_all()
    assert run.wait() == [0], run.said()
    return run


@pytest.mark.feature("Fault tolerance: tools/launch.py resumes a killed run to the same losses")
def test_a_killed_rank_is_restarted_to_the_same_numbers(
    tmp_path: Path, undisturbed: SupervisedRun
) -> None:
    environ = {"FAULTS": "step.before:kill:rank1:step5:start0"}
    run = SupervisedRun(tmp_path, environ=environ, forks=True).start_all()
    assert run.wait() == [0], run.said()
    assert run.numbers() == undisturbed.numbers()
    report = run.exit()
    assert (report["kind"], report["restarts"]) == ("done", 1)
    assert "ended by SIGKILL without a report" in report["outcomes"][0]["cause"]
    assert not run.rank_processes()


def test_an_error_of_the_user_is_reported_once_and_not_restarted(tmp_path: Path) -> None:
    flags = ["--tensor-model-parallel-size", "3"]
    run = SupervisedRun(tmp_path, flags=flags, forks=True).start_all()
    assert run.wait() == [2]
    assert run.said().count("--num-attention-heads 4 cannot be split over") == 1
    assert (run.exit()["kind"], run.exit()["restarts"]) == ("user_error", 0)


@pytest.mark.feature("Fault tolerance: a stop signal to the launcher saves and is not restarted")
@pytest.mark.parametrize(
    "signum", selection.first(1, [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
)
def test_a_stop_signal_lets_all_ranks_save_and_ends_with_0(tmp_path: Path, signum: int) -> None:
    run = SupervisedRun(tmp_path, steps=100_000, forks=True).start_all()
    run.until(lambda: run.logged(3))
    os.kill(run.processes[0].pid, signum)
    assert run.wait() == [0], run.said()
    report = run.exit()
    assert (report["kind"], report["resumable"], report["restarts"]) == ("stopped", True, 0)
    assert report["saved_iteration"] == max(run.numbers())


def test_a_killed_launcher_leaves_no_rank(tmp_path: Path) -> None:
    run = SupervisedRun(tmp_path, steps=100_000).start_all()
    run.until(lambda: run.logged(1))
    ranks = run.rank_processes()
    assert set(ranks) == {0, 1}
    os.kill(ranks[1], signal.SIGSTOP)  # it cannot poll anything
    watched = [os.pidfd_open(pid) for pid in ranks.values()]
    run.processes[0].kill()
    run.processes[0].wait()
    for descriptor in watched:
        ended, _, _ = select.select([descriptor], [], [], 30)
        os.close(descriptor)
        assert ended, "it outlived its launcher"


def test_a_checkpoint_directory_that_goes_away_ends_the_run_with_2(tmp_path: Path) -> None:
    """The restart must not begin anew in an empty folder."""
    environ = {"FAULTS": "step.before:hang:rank1:step5:start0"}
    run = SupervisedRun(tmp_path, environ=environ, forks=True).start_all()
    # Rank 0 still saves when the metrics of the step are written.
    run.until(lambda: "successfully saved checkpoint from iteration       4 " in run.said())
    (tmp_path / "checkpoints").rename(tmp_path / "gone")
    os.kill(run.rank_processes()[1], signal.SIGKILL)
    assert run.wait() == [2], run.said()
    refusals = {line for line in run.said().splitlines() if "holds no checkpoint" in line}
    assert len(refusals) == 1, "each rank prints the first failure, and there is one"
    assert run.exit()["restarts"] == 1


@pytest.mark.parametrize("conf", ["join_timeout=1", "join_timeout=1,is_host=false"])
def test_a_rendezvous_that_nobody_joins_ends_with_2_and_one_message(
    tmp_path: Path, conf: str
) -> None:
    """Also on a node that does not host the store, whose host never starts."""
    run = SupervisedRun(tmp_path, nodes=2, launcher=("--rdzv-conf", conf), forks=True)
    run.start(0)
    assert run.wait() == [2], run.said()
    (line,) = run.said().splitlines()
    assert line.startswith("ConfigError: ")
    assert "raise --rdzv-conf join_timeout" in line
    report = run.exit()
    assert (report["kind"], report["attempts"], report["restarts"]) == ("user_error", 0, 0)
