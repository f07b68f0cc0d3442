"""SIGTERM is remembered once; twice means now."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from megatron.training.signals import StopSignal, catch_stop_signal
from tests.ranks import run_ranks


@pytest.fixture(autouse=True)
def sigterm() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_the_first_signal_is_remembered() -> None:
    handler = catch_stop_signal()
    assert not handler.received_anywhere()
    os.kill(os.getpid(), signal.SIGTERM)
    assert handler.received
    assert handler.received_anywhere()
    assert handler.name == "SIGTERM"


def test_a_signal_during_start_up_is_still_known_when_the_loop_asks() -> None:
    catch_stop_signal()
    os.kill(os.getpid(), signal.SIGTERM)
    assert catch_stop_signal().received


def _ask_twice(rank: int, world_size: int) -> None:
    handler = catch_stop_signal()
    os.kill(os.getpid(), signal.SIGTERM)
    assert handler.received
    os.kill(os.getpid(), signal.SIGTERM)


def test_the_second_signal_ends_the_process() -> None:
    with pytest.raises(AssertionError, match="SIGTERM"):
        run_ranks(_ask_twice, 1)


def _signal_one_rank(rank: int, world_size: int) -> list[bool]:
    handler = StopSignal(signal.SIGTERM)
    before = handler.received_anywhere()
    handler.received = rank == 1
    return [before, handler.received_anywhere()]


def test_a_signal_to_one_rank_is_known_to_all() -> None:
    assert run_ranks(_signal_one_rank, 2) == [[False, True]] * 2
