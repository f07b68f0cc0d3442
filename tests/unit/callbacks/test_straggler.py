"""--log-straggler: the slow rank is named, and a connection switches the report."""

from __future__ import annotations

import dataclasses
import logging
import socket

import pytest
import torch.distributed as dist

from megatron.core import straggler, waiting
from megatron.core.utils import StragglerDetector
from megatron.training.callbacks.straggler import Straggler, Switch, report
from tests.ranks import run_virtual_ranks
from tests.unit.callbacks.helpers import fake_run, step_result

NONE = float("nan")


def test_the_line_names_the_ranks_at_either_end() -> None:
    rows = [
        [5.0, 300.0, 60, 97, 1700, 0.5, 2.5],
        [4.0, 310.0, 61, 99, 1980, 0.25, 3.0],
        [9.0, 290.0, 59, 98, 1980, 0.125, 1.25],
    ]
    assert report(rows, 1) == [
        "MnRtt/Rnk: 4.00ms/1 | MxRtt/Rnk: 9.00ms/2 | MnPwr/Rnk: 290.0W/2 | MxPwr/Rnk: 310.0W/1 | "
        "MnTmp/Rnk: 59C/2 | MxTmp/Rnk: 61C/1 | MnUtl/Rnk: 97%/0 | MxUtl/Rnk: 99%/1 | "
        "MnClk/Rnk: 1700MHz/0 | MxClk/Rnk: 1980MHz/2 | MnDRtt/Rnk: 0.12ms/2 | "
        "MxDRtt/Rnk: 0.50ms/0 | MnEtpt/Rnk: 1.2500TF/2 | MxEtpt/Rnk: 3.0000TF/1"
    ]
    assert report(rows, 2)[1:] == [
        "^^^^ Bottom 2 Ranks with lowest  Etpt: 1.2500TF/2, 2.5000TF/0",
        "^^^^ Top    2 Ranks with highest Etpt: 3.0000TF/1, 2.5000TF/0",
    ]


def test_what_no_rank_can_tell_is_left_out() -> None:
    (line,) = report([[5.0, NONE, NONE, NONE, NONE, 0.5, 2.5]], 1)
    assert line.startswith("MnRtt/Rnk: 5.00ms/0 | MxRtt/Rnk: 5.00ms/0 | MnDRtt/Rnk")


def train_with_a_clock(rank: int, world_size: int, is_on: bool) -> None:
    """Two steps; sections of data take 1 s here, of the model 2 s and on rank 1 5 s more."""
    run = fake_run("--log-interval 2")
    run.config = dataclasses.replace(run.config, world_size=world_size)
    run.is_rank_0 = rank == 0
    callback, stimer = Straggler(is_on, 0, 1), StragglerDetector()
    callback.on_train_start(run)
    for _ in range(2):
        with stimer(bdata=True):
            CLOCK[rank] += 1
        with stimer:
            CLOCK[rank] += 5 + 5 * rank
            waiting.record.waited_s += 3
        run.state.advance(step_result(), 0.0)
        callback.on_step_end(run, step_result())
        callback.on_pause(run, "evaluation")
        with stimer:
            CLOCK[rank] += 100
        callback.on_resume(run, "evaluation")
    callback.on_train_end(run)
    callback.close()
    assert not stimer.enabled


CLOCK = [0.0, 0.0]


@pytest.mark.feature("Logs: slow ranks are named (--log-straggler)")
def test_a_slow_rank_is_named_and_its_waits_do_not_count(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(straggler.device, "moment", lambda: CLOCK[dist.get_rank()])
    with caplog.at_level(logging.INFO):
        run_virtual_ranks(train_with_a_clock, 2, True)
        run_virtual_ranks(train_with_a_clock, 2, False)
    lines = [r.getMessage() for r in caplog.records if r.name.endswith("callbacks.straggler")]
    assert len(lines) == 1, "rank 0 alone speaks, at the interval, and not while it is off"
    assert lines[0].startswith(
        "MnRtt/Rnk: 2000.00ms/0 | MxRtt/Rnk: 7000.00ms/1 | MnDRtt/Rnk: 1000.00ms/0"
    )


def test_a_connection_switches_between_on_and_off() -> None:
    switch = Switch(True, 0)
    for is_on, word in ((False, "off"), (True, "on")):
        with socket.create_connection(("127.0.0.1", switch.port)) as connection:
            answer = connection.makefile().read()
        assert answer.startswith("HTTP/1.1 200 OK")
        assert answer.endswith(f"straggler report {word}\n")
        assert switch.is_on is is_on
    switch.close()


def test_a_port_that_is_taken_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    first = Switch(True, 0)
    second = Switch(True, first.port)
    assert f"--straggler-ctrlr-port {first.port}: " in caplog.records[-1].getMessage()
    second.close()
    first.close()
