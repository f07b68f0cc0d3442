"""Ends connections whose clients hold them without using them, or send a body in tiny parts.

uvicorn waits without a limit for the headers of a request and for a client to read an answer.  It
handles all chunks that it has read before it looks at another connection: megabytes of chunks of
one byte would stop all other requests for minutes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from megatron.core.optional import require

h11 = require("h11", "the server")
_H11Connection: Any = h11.Connection
_H11Protocol: Any = require("uvicorn.protocols.http.h11_impl", "the server").H11Protocol

_LOOKS_PER_LIMIT = 5
_MANY_PARTS = 1000  # of a body; more have this size on average
_SMALL_PART = 64  # bytes
_MAX_HEADER_BYTES = 1 << 16


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


class _Connection(_H11Connection):  # type: ignore[misc]
    """h11's parser, which refuses a body of very many small parts: each costs as a large one."""

    _num_parts = 0
    _num_bytes = 0

    def next_event(self) -> Any:
        """Return what comes next of the request."""
        found = super().next_event()
        if isinstance(found, h11.Data):
            self._num_parts += 1
            self._num_bytes += len(found.data)
            if self._num_parts > max(_MANY_PARTS, self._num_bytes // _SMALL_PART):
                raise h11.RemoteProtocolError("the body has too many small parts")
        elif isinstance(found, h11.Request):
            self._num_parts = self._num_bytes = 0
        return found


class Protocol(_H11Protocol):  # type: ignore[misc]
    """uvicorn's connection of a client, with this parser."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.conn = _Connection(h11.SERVER, _MAX_HEADER_BYTES)

    def send_400_response(self, msg: str) -> None:
        """Answer, if no answer has begun; the application sees a client that has left."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()
