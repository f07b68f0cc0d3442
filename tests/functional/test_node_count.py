"""A run goes on with fewer nodes when one is lost, and with all of them when it returns."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.functional.supervised import SupervisedRun

CONF = "keep_alive_interval=1,keep_alive_max_attempt=3,join_timeout=100,last_call_timeout=8"


@pytest.mark.slow
@pytest.mark.feature("Fault tolerance: a run goes on with fewer nodes, and with more that join")
def test_a_run_survives_the_loss_of_the_rendezvous_host_and_its_return(tmp_path: Path) -> None:
    run = SupervisedRun(
        tmp_path,
        nodes=2,
        nnodes="1:2",
        ranks=1,
        steps=160,
        launcher=("--rdzv-conf", CONF),
        environ={"FAULTS": "step.before:slow:0.2s"},
    ).start_all()
    run.until(lambda: run.logged(5))
    run.processes[0].kill()  # it hosts the rendezvous, or else its peer does
    run.processes[0].wait()
    lost_at = max(run.numbers())
    run.until(lambda: run.logged(lost_at + 8))
    assert set(run.rank_processes()) == {0}, "the remaining node trains alone"
    run.start(0)
    run.until(lambda: set(run.rank_processes()) == {0, 1})
    assert run.wait(300) == [0, 0], run.said()[-4000:]
    assert set(run.numbers()) == set(range(1, 161))
    report = run.exit()
    assert report["kind"] == "done"
    assert "further nodes join" in run.said()
