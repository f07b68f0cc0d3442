"""--log-straggler: the slow rank is named, and a connection switches the report."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import logging
import socket
import struct

import pytest
import torch.distributed as dist

from megatron.core.diagnostics import collective_tracer, straggler
from megatron.core.utils import StragglerDetector
from megatron.training.callbacks import straggler as straggler_callback
from megatron.training.callbacks.straggler import Straggler, Switch, report, slow_sections
from tests.support.callback_calls import fake_run, step_result
from tests.support.ranks import run_virtual_ranks

NONE = float("nan")
LOOPBACK = "127.0.0.1"


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


def test_the_slow_rank_is_named_with_its_section() -> None:
    rows = [[0, 20.0, 5.0, 1.0], [0, 70.0, 5.5, 1.5], [0, 21.0, 5.0, 1.0]]
    assert slow_sections(rows) == [
        "slow: rank 1 computes 70.0 ms per step in section forward-backward, the median of like "
        "ranks is 21.0 ms"
    ]
    assert slow_sections(rows[:2])[0].endswith("is 20.0 ms"), "of two ranks the faster is usual"
    assert slow_sections([[0, *rows[0][1:]], [1, *rows[1][1:]]]) == [], "other pipeline stages"
    (line,) = slow_sections([[0, 20.0, 5.0, 1.0], [0, 24.0, 5.0, 7.0]])
    assert "rank 1 computes 7.0 ms per step in section data" in line
    assert slow_sections([[0, 900.0, 5.0, 1.0], [0, 940.0, 5.0, 1.0]]) == [], "within the noise"


def train_with_a_clock(rank: int, world_size: int, is_on: bool) -> None:
    """Two steps; sections of data take 1 s here, of the model 2 s and on rank 1 5 s more."""
    run = fake_run("--log-interval 2")
    run.config = dataclasses.replace(run.config, world_size=world_size)
    run.is_rank_0 = rank == 0
    callback, stimer = Straggler(is_on, (LOOPBACK, 0), 1), StragglerDetector()
    callback.on_train_start(run)
    for _ in range(2):
        with stimer(bdata=True):
            CLOCK[rank] += 1
        with stimer:
            CLOCK[rank] += 5 + 5 * rank
            collective_tracer.record.waited_s += 3
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


def ask(switch: Switch) -> str:
    """The body of the answer to an HTTP request."""
    with contextlib.closing(http.client.HTTPConnection(*switch.server_address[:2])) as connection:
        connection.request("GET", "/")
        return connection.getresponse().read().decode()


def test_a_request_switches_between_on_and_off() -> None:
    switch = Switch(True, (LOOPBACK, 0))
    for is_on, word in ((False, "off"), (True, "on")):
        assert ask(switch) == f"straggler report {word}\n"
        assert switch.is_on is is_on
    switch.close()


def reset(connection: socket.socket) -> None:
    """Close as a port scanner does: with a reset instead of the end of the stream."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@pytest.mark.parametrize(
    "sent",
    [b"", b"x", b"GET", b"\x16\x03\x01", b"GET / HTTP/1.1", b"x" * 10_000, b"DELETE / HTTP/1.1\n"],
)
def test_what_is_no_request_changes_nothing(sent: bytes) -> None:
    switch = Switch(True, (LOOPBACK, 0))
    for end in (socket.socket.close, reset):
        connection = socket.create_connection(switch.server_address)
        connection.sendall(sent)
        end(connection)
    assert ask(switch) == "straggler report off\n", "it was on until now, and somebody listens"
    switch.close()


def test_who_sends_nothing_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(straggler_callback, "_REQUEST_S", 0.05)
    switch = Switch(True, (LOOPBACK, 0))
    with socket.create_connection(switch.server_address):
        assert ask(switch) == "straggler report off\n"
    switch.close()


def test_an_error_of_one_connection_is_not_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    switch = Switch(True, (LOOPBACK, 0))
    with monkeypatch.context() as patched:
        patched.setattr(switch, "finish_request", raise_reset)
        with pytest.raises((OSError, http.client.HTTPException)):
            ask(switch)
    assert ask(switch) == "straggler report off\n"
    switch.close()


def raise_reset(*_: object) -> None:
    raise ConnectionResetError("by peer")


def test_only_the_own_host_is_listened_to_by_default() -> None:
    run = fake_run("--log-straggler")
    assert run.config.resilience.straggler_ctrlr_address == LOOPBACK
    switch = Switch(True, (LOOPBACK, 0))
    assert switch.server_address[0] == LOOPBACK
    switch.close()


def test_a_port_that_is_taken_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    first = Switch(True, (LOOPBACK, 0))
    port = first.server_address[1]
    second = Straggler(True, (LOOPBACK, port), 1)
    second.on_train_start(fake_run())
    assert f"--straggler-ctrlr-port {port} at " in caplog.records[-1].getMessage()
    second.close()
    first.close()
