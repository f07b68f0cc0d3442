"""Nodes that are blamed, unhealthy, or return with another address.

The nodes have addresses 127.0.0.1 and so on, and node 0 hosts the store of the rendezvous.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.supervised import SupervisedRun

CONF = "last_call_timeout=8"
NAN = "step.gradient:nan:rank1:step5:start0"
SLOW = "step.before:slow:3s:start0"  # a spare node starts within the first steps
UNHEALTHY = f"{NAN},check.matmul:bitflip:start1:times1"  # after the first attempt


def start(
    run: SupervisedRun,
    node: int,
    *more: str,
    faults: str | None = None,
    address: int = 0,
    join_s: int = 100,
    is_host: bool = True,
) -> None:
    """Start ``node``; only node 0 may host the store at the endpoint."""
    hosts = str(node == 0 and is_host).lower()
    conf = f"{CONF},join_timeout={join_s},is_host={hosts}"
    place = ("--local-addr", f"127.0.0.{address or node + 1}", "--rdzv-conf", conf)
    run.start(node, *place, *more, faults=faults)


@pytest.mark.slow
@pytest.mark.feature("Fault tolerance: a node that fails --check-node after a blame is excluded")
def test_a_spare_node_replaces_a_node_that_fails_the_check_after_a_blame(tmp_path: Path) -> None:
    """The unhealthy node hosts the store, and goes on to serve it."""
    undisturbed = SupervisedRun(tmp_path / "undisturbed", ranks=2).start_all()
    assert undisturbed.wait() == [0], undisturbed.said()[-4000:]
    run = SupervisedRun(tmp_path / "faulty", nodes=3, nnodes="2", ranks=1)
    start(run, 0, "--check-node", faults=UNHEALTHY)
    start(run, 1, "--check-node", faults=NAN)
    run.until(lambda: run.logged(1))
    start(run, 2, "--check-node", faults=NAN)
    assert run.wait() == [0, 0, 0], run.said()[-6000:]
    assert run.numbers() == undisturbed.numbers()
    report = run.exit()
    assert (report["kind"], report["excluded_nodes"]) == ("done", ["node0"])
    assert "--check-node: node node0 is unhealthy" in run.said()
    assert "the product of two matrices is wrong" in run.said()
    assert "the run ended while this node waited: done (exit status 0, 2 restarts)" in run.said()


@pytest.mark.slow
def test_without_a_spare_node_the_run_ends_and_names_the_unhealthy_node(tmp_path: Path) -> None:
    run = SupervisedRun(tmp_path, nodes=2, ranks=1)
    start(run, 0, "--check-node", faults=UNHEALTHY, join_s=20)
    start(run, 1, "--check-node", faults=NAN, join_s=20)
    assert run.wait() == [1, 1], run.said()[-6000:]
    report = run.exit()
    assert (report["kind"], report["resumable"]) == ("failed", True)
    assert "fewer than 2 nodes joined" in report["reason"]
    assert "excluded: node0" in report["reason"]


@pytest.mark.slow
def test_a_run_without_a_healthy_node_ends(tmp_path: Path) -> None:
    faults = UNHEALTHY.replace("rank1", "rank0")
    run = SupervisedRun(
        tmp_path, ranks=1, launcher=("--check-node",), environ={"FAULTS": faults}
    ).start_all()
    assert run.wait() == [1], run.said()[-6000:]
    assert "the product of two matrices is wrong" in run.exit()["reason"]


@pytest.mark.slow
@pytest.mark.feature("Fault tolerance: a blamed node that hosts the rendezvous is replaced")
def test_a_blamed_node_that_hosts_the_store_is_replaced_and_serves_on(tmp_path: Path) -> None:
    flags = "--global-batch-size 6 --check-weight-hash-across-dp-replicas-interval 1".split()
    fault = f"step.updated:bitflip:rank0:step5:start0:times1,{SLOW}"
    run = SupervisedRun(
        tmp_path, nodes=4, nnodes="3", ranks=1, flags=flags, environ={"FAULTS": fault}
    )
    for node in range(3):
        start(run, node)
    run.until(lambda: run.logged(1))
    start(run, 3)
    assert run.wait() == [0, 0, 0, 0], run.said()[-6000:]
    assert set(run.numbers()) == set(range(1, 9))
    report = run.exit()
    assert (report["kind"], report["restarts"]) == ("done", 1)
    assert report["excluded_nodes"] == ["node0"]


@pytest.mark.slow
def test_an_excluded_node_that_is_started_again_does_not_train(tmp_path: Path) -> None:
    flags = "--global-batch-size 6 --check-weight-hash-across-dp-replicas-interval 1".split()
    fault = f"step.updated:bitflip:rank1:step5:start0:times1,{SLOW},step.before:slow:1s:start1"
    run = SupervisedRun(
        tmp_path, nodes=4, nnodes="3", ranks=1, steps=30, flags=flags, environ={"FAULTS": fault}
    )
    for node in range(3):
        start(run, node)
    run.until(lambda: run.logged(1))
    start(run, 3)
    waits = "node node1 is excluded from the run; it waits for the end"
    run.until(lambda: waits in run.said())
    run.processes[1].kill()
    run.processes[1].wait()
    start(run, 1)
    assert run.wait() == [0, 0, 0, 0], run.said()[-6000:]
    assert run.said().count(waits) == 2
    assert run.exit()["excluded_nodes"] == ["node1"]


@pytest.mark.slow
@pytest.mark.feature("Fault tolerance: a spare node replaces the lost host of the rendezvous")
def test_a_spare_node_replaces_the_lost_host_of_the_store(tmp_path: Path) -> None:
    faults = "step.before:slow:0.5s"
    run = SupervisedRun(
        tmp_path, nodes=3, nnodes="2", ranks=1, steps=60, environ={"FAULTS": faults}
    )
    start(run, 0)
    start(run, 1)
    run.until(lambda: run.logged(1))
    start(run, 2)
    run.until(lambda: run.logged(25))  # node 2 has connected
    run.processes[0].kill()
    run.processes[0].wait()
    assert run.wait()[1:] == [0, 0], run.said()[-6000:]
    assert set(run.numbers()) == set(range(1, 61))
    assert run.exit()["kind"] == "done"


@pytest.mark.slow
@pytest.mark.feature("Fault tolerance: a node that returns with another address finds the run")
@pytest.mark.parametrize("is_early", [True, False])
def test_a_host_that_returns_with_another_address_finds_the_new_host(
    tmp_path: Path, is_early: bool
) -> None:
    """It returns before or after another node hosts the store."""
    run = SupervisedRun(
        tmp_path,
        nodes=2,
        nnodes="1:2",
        ranks=1,
        steps=160,
        environ={"FAULTS": "step.before:slow:0.2s"},
    )
    start(run, 0)
    start(run, 1)
    run.until(lambda: run.logged(5))
    run.processes[0].kill()
    run.processes[0].wait()
    lost_at = max(run.numbers())
    if not is_early:
        run.until(lambda: run.logged(lost_at + 8))
    # The endpoint of its command line still names the address that it had.
    start(run, 0, "--rdzv-endpoint", f"192.0.2.1:{run.port}", address=9, is_host=False)
    run.until(lambda: run.logged(lost_at + 8))
    moved = json.loads((tmp_path / "reports/rendezvous.json").read_text())
    assert moved == {"run_id": run.run_id, "endpoint": f"127.0.0.2:{run.port}"}
    run.until(lambda: set(run.rank_processes()) == {0, 1})
    assert run.wait(300) == [0, 0], run.said()[-6000:]
    assert set(run.numbers()) == set(range(1, 161))
    assert run.exit()["kind"] == "done"
    assert ("further nodes join" in run.said()) != is_early
