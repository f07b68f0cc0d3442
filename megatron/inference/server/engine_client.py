"""The front end's side of the connection to the engine, for asyncio.

One task reads all messages and sorts them to the calls that wait for them.  A `Call` holds the
requests of one HTTP request: when it is closed, the engine aborts those that have not finished.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from megatron.core.config.errors import MegatronError
from megatron.core.inference.paged_engine.request import (
    QueueFullError,
    Request,
    RequestError,
    RequestOutput,
)
from megatron.inference.server import messages
from megatron.inference.server.messages import EngineInfo


class EngineDied(MegatronError):
    """The engine ended, or a step of it failed."""


class EngineClient:
    """Requests to the engine, and its answers."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._calls: dict[str, Call] = {}  # by request id
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._numbers = itertools.count()
        self._flush_lock = asyncio.Lock()
        self.failure: str | None = None

    @property
    def num_open(self) -> int:
        """Number of requests that the engine has not finished."""
        return len(self._calls)

    async def hello(self) -> EngineInfo:
        """Return the first message.  Raises EngineDied if the engine ends before it."""
        line = await self._reader.readline()
        if not line:
            raise EngineDied("the engine ended before its model was loaded")
        return messages.read_hello(messages.decode(line))

    async def read_until_the_end(self) -> str:
        """Sort messages to their calls until the engine ends; return why it did."""
        message = "the engine's process has ended"
        try:
            while line := await self._reader.readline():
                found = messages.decode(line)
                if found["type"] == "failed":
                    message = f"the engine failed: {found['message']}"
                    break
                self._dispatch(found)
                # A line that has already arrived is returned without a pause: let others run.
                await asyncio.sleep(0)
        except (OSError, ValueError, messages.ProtocolError) as error:
            message = f"the connection to the engine failed: {error}"
        self.failure = message
        for call in {*self._calls.values()}:
            call.put(EngineDied(message))
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(EngineDied(message))
        return message

    async def ask(self, kind: str, timeout_s: float, **content: object) -> dict[str, Any]:
        """Send a message that is no request; return the answer.

        Raises EngineDied, or TimeoutError if the engine does not answer in time.
        """
        number = next(self._numbers)
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        try:
            self.send(kind, call=number, **content)
            return await asyncio.wait_for(answer, timeout_s)
        except asyncio.TimeoutError:
            raise TimeoutError(f"the engine has not answered for {timeout_s:g} s") from None
        finally:
            del self._answers[number]

    def send(self, kind: str, **content: object) -> None:
        """Send a message.  Raises EngineDied."""
        if self.failure is not None:
            raise EngineDied(self.failure)
        self._writer.write(messages.encode(kind, **content))

    async def flush(self) -> None:
        """Let the engine take what has been sent, and other tasks run.  Raises EngineDied."""
        try:
            async with self._flush_lock:  # one task can wait at a time in Python 3.10
                await self._writer.drain()
        except OSError as error:
            raise EngineDied(f"the connection to the engine failed: {error}") from None
        await asyncio.sleep(0)  # drain() makes no pause if little is unsent

    def close(self) -> None:
        """End the connection, and with it the engine."""
        self._writer.close()

    def register(self, call: Call, request_id: str) -> None:
        """Sort the outputs of a request to ``call``."""
        self._calls[request_id] = call

    def forget(self, request_id: str) -> None:
        """Drop what the engine still sends of a request."""
        self._calls.pop(request_id, None)

    def _dispatch(self, message: Mapping[str, Any]) -> None:
        kind = message["type"]
        if kind == "outputs":
            for item in message["items"]:
                call = self._calls.get(item["request_id"])
                if call is not None:  # else aborted while the step ran
                    call.put(RequestOutput.from_json(item))
        elif kind in ("accepted", "refused"):
            call = self._calls.get(message["id"])
            if call is not None:
                call.put(None if kind == "accepted" else _error_of(message))
        else:
            answer = self._answers.get(message["call"])
            if answer is not None and not answer.done():
                answer.set_result(dict(message))


def _error_of(message: Mapping[str, Any]) -> MegatronError:
    if message["reason"] == "queue_full":
        return QueueFullError(message["message"])
    return RequestError(message["message"], message["param"])


class Call:
    """Requests of one HTTP request.  `start` it, read its `outputs`, and always `close` it."""

    def __init__(self, client: EngineClient, requests: Sequence[Request]) -> None:
        self._client = client
        self._requests = requests
        self._queue: asyncio.Queue[RequestOutput | MegatronError | None] = asyncio.Queue()
        self._open = {request.request_id for request in requests}
        self._early: list[RequestOutput] = []  # outputs that came before the last acceptance

    def put(self, item: RequestOutput | MegatronError | None) -> None:
        """Take an output, an error, or None for an accepted request."""
        self._queue.put_nowait(item)

    async def start(self) -> None:
        """Send the requests and return when the engine has accepted all of them.

        Raises RequestError, QueueFullError or EngineDied; then no request stays open.
        """
        try:
            for request in self._requests:
                self._client.register(self, request.request_id)
                self._client.send("add", request=messages.request_to_json(request))
                await self._client.flush()
            num_accepted = 0
            while num_accepted < len(self._requests):
                item = await self._take()
                if item is None:
                    num_accepted += 1
                else:
                    self._early.append(item)
        except BaseException:
            self.close()
            raise

    async def outputs(self) -> AsyncIterator[RequestOutput]:
        """Yield outputs until all requests have finished.  Raises EngineDied."""
        while self._open:
            item = self._early.pop(0) if self._early else await self._take()
            assert item is not None, "all requests have been accepted"
            if item.request_id in self._open:
                if item.finish_reason is not None:
                    self._open.discard(item.request_id)
                    self._client.forget(item.request_id)
                yield item
                # Without a pause for each output, a client that has left is not noticed.
                await asyncio.sleep(0)

    def finish(self, request_id: str) -> None:
        """Abort one request: no more of it is wanted."""
        if request_id in self._open:
            self._open.discard(request_id)
            self._client.forget(request_id)
            if self._client.failure is None:
                self._client.send("abort", id=request_id)

    def close(self) -> None:
        """Abort all requests that have not finished."""
        for request_id in tuple(self._open):
            self.finish(request_id)

    async def _take(self) -> RequestOutput | None:
        item = await self._queue.get()
        if isinstance(item, MegatronError):
            raise item
        return item
