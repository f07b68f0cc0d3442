"""Spare nodes, excluded nodes and the host of the store, with torch's rendezvous."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousGracefulExitError
from torch.distributed.launcher.api import LaunchConfig

from megatron.training.fault_tolerance import rendezvous
from megatron.training.fault_tolerance.launch_flags import parse
from megatron.training.fault_tolerance.rendezvous import (
    AttemptCoordination,
    Connector,
    Node,
    Rendezvous,
)
from megatron.training.fault_tolerance.restart_policy import Decision, History, NodeReport, to_json


def config(tmp_path: Path, endpoint: str, nnodes: str, *more: str) -> LaunchConfig:
    """Return the settings of a command line."""
    script = tmp_path / "script.py"
    script.touch()
    words = ["--nnodes", nnodes, "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint]
    return parse([*words, *more, "--exit-report-dir", str(tmp_path), str(script)]).config


@pytest.fixture
def store() -> dist.TCPStore:
    """Store of the run."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def here(tmp_path: Path, store: dist.TCPStore) -> Iterator[Rendezvous]:
    """The only node of a run with one node."""
    found = Rendezvous(config(tmp_path, f"127.0.0.1:{store.port}", "1"), "here")
    found.next_rendezvous()
    yield found
    found.shutdown()


@pytest.fixture
def other(tmp_path: Path, store: dist.TCPStore, here: Rendezvous) -> Rendezvous:
    """Another node, which has connected to the run."""
    return Rendezvous(config(tmp_path, f"127.0.0.1:{store.port}", "1"), "other")


def test_only_a_node_that_waits_for_a_place_is_a_spare_node(
    here: Rendezvous, other: Rendezvous
) -> None:
    assert here.num_spare_nodes() == 0, "it has connected, as a node that was lost later"
    ended: list[str] = []

    def wait() -> None:
        try:
            other.next_rendezvous()
        except RendezvousGracefulExitError:
            ended.append("the run has ended")

    thread = threading.Thread(target=wait)
    thread.start()
    while here.num_spare_nodes() == 0:
        time.sleep(0.01)
    state = here._state_holder.state
    state.wait_list.update(state.redundancy_list)  # as after two nodes ran for one place
    here._state_holder.mark_dirty()
    assert here.num_nodes_waiting() == 0, "there is no room"
    here.shutdown()
    thread.join()
    assert ended == ["the run has ended"]


def test_a_node_that_leaves_by_the_check_is_excluded_for_all(
    here: Rendezvous, other: Rendezvous
) -> None:
    assert here.excluded(History(excluded=("a",))) == ("a",)
    other.report_unhealthy()
    assert here.excluded(History(excluded=("a",))) == ("a", "other")
    assert not here.is_empty()
    here.leave()
    assert other.is_empty(), "an excluded node alone must not wait for an end"


@pytest.mark.parametrize(
    ("nnodes", "num_spare", "takes_over"), [("2", 0, False), ("2", 1, True), ("1:2", 0, True)]
)
def test_enough_nodes_must_remain_to_host_the_store_elsewhere(
    tmp_path: Path, nnodes: str, num_spare: int, takes_over: bool
) -> None:
    """The nodes' addresses may be spelt differently than the endpoint."""
    found = config(tmp_path, "10.1.2.3:29500", nnodes)
    nodes = (Node("first", "first.cluster", True), Node("second", "second.cluster", False))
    last = AttemptCoordination(dist.HashStore(), 1, nodes, num_training=2, name="attempt")
    connector = Connector(found, "second", tmp_path, host_timeout_s=0.0)
    tried = {c.rdzv_endpoint for c in islice(connector._candidates(last, num_spare, 0.0), 4)}
    elsewhere = {"second.cluster:29500"} if takes_over else set()
    assert tried == {"10.1.2.3:29500"} | elsewhere


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> list[AttemptCoordination]:
    """Two nodes with one store."""
    monkeypatch.setattr(rendezvous, "_POLL_S", 0.0)
    store = dist.HashStore()
    nodes = tuple(Node(name, name, False) for name in "ab")
    return [AttemptCoordination(store, rank, nodes, 2, "attempt") for rank in range(2)]


def test_the_reports_of_all_nodes_are_collected(attempts: list[AttemptCoordination]) -> None:
    here, there = attempts
    polls: list[int] = []

    def other() -> list[int]:
        if not polls:
            there.store.set("report/1", to_json(NodeReport(node="b")))
        polls.append(1)
        return []

    reports, lost = here.collect(NodeReport(node="a"), 60.0, other)
    assert [report.node for report in reports] == ["a", "b"]
    assert lost == []


def test_a_lost_node_does_not_hold_up_the_others(attempts: list[AttemptCoordination]) -> None:
    reports, lost = attempts[0].collect(NodeReport(node="a"), 60.0, lambda: [1])
    assert ([report.node for report in reports], lost) == (["a"], ["b"])


def test_all_nodes_take_the_decision_that_was_written_first(
    attempts: list[AttemptCoordination],
) -> None:
    one = Decision(restarts=True, code=0, why="x", history=History(attempts=1))
    two = Decision(restarts=False, code=1, why="y", history=History(attempts=1))
    assert attempts[0].agree(one) == one
    assert attempts[1].agree(two) == one


def test_a_node_without_a_sign_of_life_is_lost(tmp_path: Path, store: dist.TCPStore) -> None:
    found = config(tmp_path, f"127.0.0.1:{store.port}", "2", "--node-timeout", "2")
    assert found.rdzv_configs["keep_alive_interval"] == 1
    nodes = [Rendezvous(found, name) for name in ("a", "b")]
    history = History(attempts=1, placement=1)
    nodes[0].history = history
    with ThreadPoolExecutor() as threads:
        list(threads.map(lambda node: node.next_rendezvous(), nodes))
    first, second = sorted(nodes, key=lambda node: node.attempt.rank)  # type: ignore[union-attr]
    assert [node.attempt.rank for node in (first, second)] == [0, 1]  # type: ignore[union-attr]
    assert first._get_world()[0] == 1, "the placement turns the nodes"
    assert second.history == history, "that of the most attempts is valid"
    assert first.lost_nodes() == []
    second._stop_heartbeats()
    deadline_s = time.monotonic() + 30
    while not first.lost_nodes() and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert first.lost_nodes() == [1]
    first.shutdown()
