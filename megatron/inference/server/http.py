"""What every endpoint does with a connection: read a JSON body, check the key, notice its end."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

from megatron.core.optional import require
from megatron.inference.server.errors import ApiError
from megatron.inference.server.fields import Body, parse_json

responses = require("starlette.responses", "the server")

T = TypeVar("T")
_Streaming: Any = responses.StreamingResponse

_BODY_TIMEOUT_S = 30.0  # for all of a body
_BODY_TYPES = ("", "application/json", "application/x-www-form-urlencoded")  # last: curl -d
_LOOPBACK_HOST = re.compile(r"(localhost\.?|127(\.\d{1,3}){3}|\[::1\])(:\d*)?", re.IGNORECASE)


class ClientGone(Exception):
    """The client has closed the connection: nobody reads the answer."""


async def read_json(request: Any, max_bytes: int) -> Body:
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
    found = parse_json(data, "the body")
    if not isinstance(found, dict):
        raise ApiError("the body must be a JSON object")
    return found


def _is_same_origin(request: Any) -> bool:
    """Whether no other site's page sends this; browsers ask before they send JSON, not forms."""
    origin = request.headers.get("origin")
    return origin is None or origin.partition("://")[2] == request.headers.get("host")


async def _read_body(request: Any, max_bytes: int) -> bytes:
    length = request.headers.get("content-length", "")
    parts: list[bytes] = []
    num_bytes = int(length) if length.isdecimal() else 0
    too_long = ApiError(f"the body has more than {max_bytes} bytes", status=413)
    if num_bytes > max_bytes:
        raise too_long
    num_bytes = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        parts.append(message.get("body", b""))
        num_bytes += len(parts[-1])
        if num_bytes > max_bytes:
            raise too_long
        if not message.get("more_body", False):
            return b"".join(parts)


def check_framing(request: Any) -> None:
    """Raise ApiError for two lengths of a body; the connection then ends with the answer.

    A proxy that believes the other one takes the rest of the body for another client's request.
    """
    if "transfer-encoding" in request.headers and "content-length" in request.headers:
        raise ApiError("send Transfer-Encoding or Content-Length, not both", is_last=True)


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
        for future in (task, watch):
            if not future.done():
                future.cancel()
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


def event(data: object) -> str:
    """Return one server-sent event."""
    return f"data: {json.dumps(data, separators=(',', ':'))}\n\n"


DONE = "data: [DONE]\n\n"
