"""SIGTERM is remembered once; twice means now, unless the second one is an echo."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from unittest import mock

import pytest

from megatron.training.process import signals
from megatron.training.process.signals import StopSignal, catch_stop_signal
from megatron.training.step.evaluate import received_anywhere
from tests.support.ranks import run_ranks


@pytest.fixture(autouse=True)
def sigterm() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_the_first_signal_is_remembered() -> None:
    handler = catch_stop_signal()
    assert not received_anywhere(handler)
    os.kill(os.getpid(), signal.SIGTERM)
    assert handler.received
    assert received_anywhere(handler)
    assert handler.name == "SIGTERM"


def test_a_signal_during_start_up_is_still_known_when_the_loop_asks() -> None:
    catch_stop_signal()
    os.kill(os.getpid(), signal.SIGTERM)
    assert catch_stop_signal().received


def _ask_twice(rank: int, world_size: int) -> None:
    handler = catch_stop_signal()
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
    assert handler.received, "the second one may be the launcher's copy of the first"
    with mock.patch.object(signals, "ECHO_S", -1.0):
        os.kill(os.getpid(), signal.SIGTERM)


def test_a_second_signal_after_a_while_ends_the_process() -> None:
    with pytest.raises(AssertionError, match="SIGTERM"):
        run_ranks(_ask_twice, 1)


def _signal_one_rank(rank: int, world_size: int) -> list[bool]:
    handler = StopSignal(signal.SIGTERM)
    before = received_anywhere(handler)
    handler.received = rank == 1
    return [before, received_anywhere(handler)]


def test_a_signal_to_one_rank_is_known_to_all() -> None:
    assert run_ranks(_signal_one_rank, 2) == [[False, True]] * 2


_EARLY = """
import os, signal, sys
import megatron.training.process.early_sigterm
os.kill(os.getpid(), signal.SIGTERM)
from megatron.training.process.signals import catch_stop_signal
assert "torch" not in sys.modules, "the signal is caught before the imports that take seconds"
assert catch_stop_signal().received
"""


def test_a_signal_during_the_imports_is_kept_where_the_flag_is_given() -> None:
    command = [sys.executable, "-c", _EARLY]
    assert subprocess.run([*command, "--exit-signal-handler"]).returncode == 0
    assert subprocess.run(command).returncode == -signal.SIGTERM
