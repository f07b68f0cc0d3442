"""tools/check_node.py names the slow or wrong node, in bounded time."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.repo.source import ROOT
from tests.support import forked

TOOL = [str(ROOT / "tools/check_node.py"), "--device", "cpu", "--disk-mib", "1"]


def start(*flags: str, **environ: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [forked.python(), *TOOL, *flags],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.feature("Running: a slow or wrong node is named before a run (tools/check_node.py)")
def test_nodes_are_compared_and_the_unhealthy_ones_named(tmp_path: Path) -> None:
    """Of four nodes, 1 computes wrong bits, the disk of 2 hangs, 3 stops in a collective."""
    faults = "check.matmul:bitflip:rank1,check.disk:hang:rank2,check.collective:hang:rank3:times1"
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    nodes = [
        start(
            *("--folder", str(tmp_path), "--limit-s", "6", "--json", "--slow-below", "0.001"),
            RANK=str(rank),
            WORLD_SIZE="4",
            GROUP_RANK=str(rank),
            MASTER_ADDR="localhost",
            MASTER_PORT=str(store.port),
            TORCHELASTIC_USE_AGENT_STORE="True",  # the store of this test
            FAULTS=faults,
        )
        for rank in range(4)
    ]
    outputs = [node.communicate()[0] for node in nodes]
    report = json.loads(outputs[0])
    found = {finding["rank"]: finding for finding in report["findings"]}
    assert set(found) == {1, 2, 3}
    assert "other bits" in found[1]["text"]
    assert (found[2]["check"], found[2]["text"]) == ("disk", "no result within 6 s")
    assert (found[3]["check"], found[3]["text"][:19]) == ("link", "no result within 6 ")
    assert [name[-2:] for name in report["unhealthy_nodes"]] == ["/1", "/2", "/3"]
    assert [node.returncode for node in nodes] == [1, 1, 1, 1]


def test_a_healthy_node_prints_a_table(tmp_path: Path) -> None:
    with start("--folder", str(tmp_path), "--slow-below", "0.001") as node:
        out, _ = node.communicate()
    assert node.returncode == 0
    assert out.splitlines()[-1] == "1 node, all healthy"
    assert "disk write (MB/s)" in out


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--folder", "/missing"], "--folder /missing: it is not a folder on this host"),
        (["--slow-below", "1.5"], "--slow-below 1.5: it must lie between 0 and 1"),
        (["--expect", "/missing"], "--expect /missing: it cannot be read"),
    ],
)
def test_wrong_arguments_have_their_own_status(flags: list[str], why: str) -> None:
    with start(*flags) as node:
        _, error = node.communicate()
    assert why in error
    assert node.returncode == 2
