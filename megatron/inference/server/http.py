"""Connections of clients: read a JSON body, check the key, notice their end.

`IdleConnections` and `Protocol` end connections whose clients hold them without using them, or send
a body in tiny parts.  uvicorn waits without a limit for the headers of a request and for a client
to read an answer.  It handles all chunks that it has read before it looks at another connection:
megabytes of chunks of one byte would stop all other requests for minutes.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from megatron.core.optional import require
from megatron.inference.server.fields import ApiError, Body, parse_json

responses = require("starlette.responses", "the server")

T = TypeVar("T")
_Streaming: Any = responses.StreamingResponse
json_answer: Any = responses.JSONResponse

_BODY_TIMEOUT_S = 30.0  # for all of a body
_BODY_TYPES = ("", "application/json", "application/x-www-form-urlencoded")  # last: curl -d
_LOOPBACK_HOST = re.compile(r"(localhost\.?|127(\.\d{1,3}){3}|\[::1\])(:\d*)?", re.IGNORECASE)


class ClientGone(Exception):
    """The client has closed the connection: nobody reads the answer."""


async def read_json(request: Any, max_bytes: int, *, may_be_empty: bool = False) -> Body:
    """Return the JSON object of a request's body.  Raises ApiError, ClientGone."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in _BODY_TYPES:
        raise ApiError(f"Content-Type {kind}: send application/json", status=415)
    if kind != "application/json" and not _is_same_origin(request):
        raise ApiError("a page of another origin must send application/json", status=415)
    try:
        data = await asyncio.wait_for(_read_body(request, max_bytes), _BODY_TIMEOUT_S)
    except asyncio.TimeoutError:
        raise ApiError(
            f"the body did not arrive in {_BODY_TIMEOUT_S:g} s; send it again", status=408
        ) from None
    if may_be_empty and not data.strip():
        return {}
    found = parse_json(data, "the body")
    if not isinstance(found, dict):
        raise ApiError("the body must be a JSON object")
    return found


def _is_same_origin(request: Any) -> bool:
    """Whether no other site's page sends this; browsers ask before they send JSON, not forms."""
    origin = request.headers.get("origin")
    return origin is None or origin.partition("://")[2] == request.headers.get("host")


async def _read_body(request: Any, max_bytes: int) -> bytes:
    too_long = ApiError(f"the body has more than {max_bytes} bytes", status=413)
    if int(request.headers.get("content-length", 0)) > max_bytes:
        raise too_long
    data = bytearray()
    has_more = True
    while has_more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        data += message.get("body", b"")
        has_more = message.get("more_body", False)
        if len(data) > max_bytes:
            raise too_long
    return bytes(data)


def check_framing(request: Any) -> None:
    """Raise ApiError for two lengths of a body; the connection then ends with the answer.

    A proxy that believes the other one takes the rest of the body for another client's request.
    """
    if "transfer-encoding" in request.headers and "content-length" in request.headers:
        text = "send Transfer-Encoding or Content-Length, not both"
        raise ApiError(text, headers={"Connection": "close"})


def check_site(request: Any, own_name: str) -> None:
    """Raise ApiError if a page of another site may have sent the request.

    A page whose name its owner has pointed at 127.0.0.1 (DNS rebinding) may read every answer, but
    its requests have this name as Host.  ``own_name``: another name that is allowed.
    """
    host = request.headers.get("host", "localhost")  # a browser always sends it
    is_own = re.fullmatch(rf"{re.escape(own_name)}(:\d*)?", host, re.IGNORECASE)
    if not _LOOPBACK_HOST.fullmatch(host) and not is_own:
        raise ApiError(
            f"Host {host[:80]!r}: a server without keys on 127.0.0.1 answers requests to localhost "
            "only; use http://localhost, or start the server with --api-key-file",
            status=403,
        )
    if not _is_same_origin(request):
        raise ApiError(
            "Origin: a page of another site has sent this request, which a server without keys "
            "refuses; start it with --api-key-file",
            status=403,
        )


def is_loopback(address: str) -> bool:
    """Return whether only this machine reaches an address of a listening socket."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def check_key(authorization: str, keys: Sequence[str]) -> None:
    """Raise ApiError unless the header has one of ``keys``."""
    scheme, _, given = authorization.partition(" ")
    found = [hmac.compare_digest(given.strip().encode(), key.encode()) for key in keys]
    if scheme.lower() != "bearer" or not any(found):
        raise ApiError(
            "send 'Authorization: Bearer KEY' with a key of this server",
            status=401,
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )


async def until_disconnect(receive: Any, work: Awaitable[T]) -> T:
    """Return the result of ``work``; cancel it and raise ClientGone if the client leaves.

    The body of the request must have been read.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnect(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(_Streaming):  # type: ignore[misc]
    """Server-sent events.  ``close`` is called at the end, also if the client leaves before."""

    def __init__(self, events: AsyncIterator[str], close: Callable[[], None]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._close = close

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await until_disconnect(receive, self.stream_response(send))
        except ClientGone:
            pass
        finally:
            self._close()


def event(data: Mapping[str, Any]) -> str:
    """Return one server-sent event, which has the name of its ``type``, if any."""
    name = f"event: {data['type']}\n" if "type" in data else ""
    return f"{name}data: {json.dumps(data, separators=(',', ':'))}\n\n"


DONE = "data: [DONE]\n\n"


h11 = require("h11", "the server")
_H11Connection: Any = h11.Connection
_H11Protocol: Any = require("uvicorn.protocols.http.h11_impl", "the server").H11Protocol

_LOOKS_PER_LIMIT = 5
_MANY_PARTS = 1000  # of a body; more have this size on average
_SMALL_PART = 64  # bytes
_MAX_HEADER_BYTES = 1 << 16


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
        # By uvicorn's object of a connection: its state, and since when it has this state.
        self._since: dict[Any, tuple[tuple[Any, int], float]] = {}

    async def end_for_ever(self, connections: Iterable[Any]) -> None:
        """Call `end` regularly until the task is cancelled; ``connections`` is uvicorn's."""
        while True:
            await asyncio.sleep(min(self._limits_s) / _LOOKS_PER_LIMIT)
            self.end(connections)

    def end(self, connections: Iterable[Any]) -> None:
        """End the connections that exceed their limit."""
        now_s = self._clock()
        before = self._since
        self._since = {}
        for connection in tuple(connections):
            cycle = connection.cycle  # of the last request whose headers are complete
            num_unread = connection.transport.get_write_buffer_size()
            if num_unread == 0 and cycle is not None and not cycle.response_complete:
                continue  # the server works for it
            state = (cycle, num_unread)  # equal while nothing happens
            old, since_s = before.get(connection, (state, now_s))
            since_s = since_s if old == state else now_s
            if now_s - since_s > self._limits_s[num_unread > 0]:
                connection.transport.abort()  # the application sees a client that has left
            else:
                self._since[connection] = (state, since_s)


class _Connection(_H11Connection):  # type: ignore[misc]
    """h11's parser, which refuses a body of very many small parts: each costs as a large one."""

    _num_parts = 0
    _num_bytes = 0

    def next_event(self) -> Any:
        """Return the next event of the request."""
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
