"""Spare nodes, excluded nodes and the host of the store, with torch's rendezvous."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousGracefulExitError
from torch.distributed.launcher.api import LaunchConfig

from megatron.training.supervisor.command_line import parse
from megatron.training.supervisor.connection import Connector
from megatron.training.supervisor.evidence import NodeReport, RankEnd, outcome_of
from megatron.training.supervisor.policy import History
from megatron.training.supervisor.rendezvous import Rendezvous, Round


def config(tmp_path: Path, endpoint: str, nnodes: str) -> LaunchConfig:
    """Return the settings of a command line."""
    script = tmp_path / "script.py"
    script.touch()
    words = ["--nnodes", nnodes, "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint]
    return parse([*words, "--exit-report-dir", str(tmp_path), str(script)]).config


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
    state = here._inner._state_holder.state
    state.wait_list.update(state.redundancy_list)  # as after two nodes ran for one place
    here._inner._state_holder.mark_dirty()
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
    last = Round(
        store=dist.HashStore(),
        rank=1,
        names=("first", "second"),
        addresses=("first.cluster", "second.cluster"),
        num_training=2,
        history=History(),
        name="attempt",
        hosts=(True, False),
    )
    connector = Connector(found, "second", tmp_path, host_timeout_s=0.0)
    tried = {c.rdzv_endpoint for c in islice(connector._candidates(last, num_spare, 0.0), 4)}
    elsewhere = {"second.cluster:29500"} if takes_over else set()
    assert tried == {"10.1.2.3:29500"} | elsewhere


def test_a_node_that_started_later_reads_the_outcomes_of_earlier_attempts(
    here: Rendezvous, other: Rendezvous
) -> None:
    failed = outcome_of([NodeReport(node="here", ranks=(RankEnd(rank=0, code=1, at_s=0.0),))])
    here.run_store.set("outcome/2", failed.to_text())
    assert other.outcomes(2) == [failed], "the first attempt was made with another store"
    assert other.outcomes(1) == []
