"""Connections that their clients hold without using them."""

from __future__ import annotations

import pytest

pytest.importorskip("starlette")

from megatron.inference.server.http import IdleConnections


class Connection:
    """uvicorn's protocol object, as far as the server reads it."""

    def __init__(self, num_unread=0, cycle=None):
        self.num_unread = num_unread
        self.cycle = cycle
        self.is_ended = False
        self.transport = self

    def get_write_buffer_size(self):
        return self.num_unread

    def abort(self):
        self.is_ended = True


class Request:
    """uvicorn's object of a request; two are never equal."""

    def __init__(self, *, is_answered):
        self.response_complete = is_answered


def ends(connection, *, change=lambda: None):
    """Return whether a connection has ended before each of the seconds 0, 5, ... 75."""
    now_s = [0.0]
    idle = IdleConnections(15, 60, lambda: now_s[0])
    found = []
    for now_s[0] in range(0, 80, 5):
        change()
        idle.end([connection])
        found.append(connection.is_ended)
    return found


def test_a_client_has_a_limit_for_the_headers_of_a_request():
    for cycle in (None, Request(is_answered=True)):
        assert ends(Connection(cycle=cycle)).index(True) == 20 // 5


def test_a_client_has_a_limit_for_reading_an_answer():
    for is_answered in (False, True):
        cycle = Request(is_answered=is_answered)
        assert ends(Connection(num_unread=9, cycle=cycle)).index(True) == 65 // 5


def test_a_client_whose_request_is_being_answered_has_no_limit():
    assert not any(ends(Connection(cycle=Request(is_answered=False))))


def test_a_client_that_reads_slowly_has_no_limit():
    connection = Connection(num_unread=99, cycle=Request(is_answered=False))

    def read():
        connection.num_unread -= 1

    assert not any(ends(connection, change=read))


def test_a_client_that_sends_one_request_after_the_other_has_no_limit():
    connection = Connection()

    def ask():
        connection.cycle = Request(is_answered=True)

    assert not any(ends(connection, change=ask))
