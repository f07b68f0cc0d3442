"""A run goes on with fewer nodes when one is lost, with all when it returns, and with a spare."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.supervised import SupervisedRun

CONF = "join_timeout=100,last_call_timeout=8"


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


@pytest.mark.slow
@pytest.mark.feature("Fault tolerance: a spare node replaces the node whose weights are wrong")
def test_a_spare_node_takes_the_place_of_a_blamed_one(tmp_path: Path) -> None:
    flags = "--global-batch-size 6 --check-weight-hash-across-dp-replicas-interval 1".split()
    undisturbed = SupervisedRun(tmp_path / "undisturbed", nodes=3, ranks=1, flags=flags).start_all()
    assert undisturbed.wait() == [0, 0, 0], undisturbed.said()[-4000:]
    fault = "step.updated:bitflip:rank1:step5:start0:times1,step.before:slow:3s:start0"
    run = SupervisedRun(
        tmp_path / "faulty", nodes=4, nnodes="3", ranks=1, flags=flags, environ={"FAULTS": fault}
    )
    for node in range(3):
        run.start(node)
    run.until(lambda: run.logged(1))
    run.start(3)  # it connects within the next four slow steps
    assert run.wait() == [0, 0, 0, 0], run.said()[-4000:]
    assert run.numbers() == undisturbed.numbers()
    report = run.exit()
    assert (report["kind"], report["reason"], report["restarts"]) == ("done", "done", 1)
    assert len(report["excluded_nodes"]) == 1
    (blamed,) = report["excluded_nodes"]
    assert f"rank 1 on {blamed}: " in "".join(report["outcomes"][0]["causes"])
