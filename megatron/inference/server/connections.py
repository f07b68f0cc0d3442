"""Ends connections whose clients hold them without using them.

uvicorn waits without a limit for the headers of a request and for a client to read an answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

_LOOKS_PER_LIMIT = 5


class _State(NamedTuple):
    """What a connection waits for; while nothing happens the state stays equal."""

    request: Any  # the last one whose headers are complete, as uvicorn's object
    num_unread: int  # bytes that the client has not taken; 0: it owes us headers


class IdleConnections:
    """Notes since when the state of each connection has not changed.

    ``header_limit_s``: for the headers of a request, from the connection's beginning or the last
    answer.  ``unread_limit_s``: for a client that takes nothing of an answer.
    """

    def __init__(
        self, header_limit_s: float, unread_limit_s: float, clock: Callable[[], float]
    ) -> None:
        self._limits_s = (header_limit_s, unread_limit_s)
        self._clock = clock
        self._since: dict[Any, tuple[_State, float]] = {}  # by uvicorn's protocol object

    async def end_for_ever(self, connections: Iterable[Any]) -> None:
        """End what exceeds its limit until the task is cancelled; ``connections`` is uvicorn's."""
        while True:
            await asyncio.sleep(min(self._limits_s) / _LOOKS_PER_LIMIT)
            self.end(connections)

    def end(self, connections: Iterable[Any]) -> None:
        """End the connections that exceed their limit."""
        now_s = self._clock()
        before = self._since
        self._since = {}
        for connection in tuple(connections):
            state = _state_of(connection)
            if state is None:
                continue
            old, since_s = before.get(connection, (None, now_s))
            since_s = since_s if old == state else now_s
            if now_s - since_s > self._limits_s[state.num_unread > 0]:
                connection.transport.abort()  # the application sees a client that has left
            else:
                self._since[connection] = (state, since_s)


def _state_of(connection: Any) -> _State | None:
    """Return what a connection waits for; None while the server works for it."""
    num_unread = connection.transport.get_write_buffer_size()
    cycle = connection.cycle
    if num_unread == 0 and cycle is not None and not cycle.response_complete:
        return None
    return _State(cycle, num_unread)
