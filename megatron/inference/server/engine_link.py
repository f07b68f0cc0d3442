"""The connection between front end and engine: its messages, and the loops at both ends.

Messages are JSON objects, one a line, over a Unix socket.  To the engine: add, abort, stats, ping,
update_weights.  From it: hello (first), accepted, refused, outputs (one for each step, and one for
each output that may be long), stats, pong, updated, failed.

`EngineLoop` runs in the engine's process: between two steps it reads the messages that have
arrived; an idle engine waits for the next one.  The end of the socket is the end of the front end:
open requests are aborted and the loop ends.  `EngineClient` is the front end's side, for asyncio:
one task reads all messages and sorts them to the calls that wait for them.  A `Call` holds the
requests of one HTTP request: when it is closed, the engine aborts those that have not finished.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import selectors
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from megatron.core.config.errors import MegatronError
from megatron.core.inference.paged_engine.request import (
    BeamParams,
    PromptImage,
    QueueFullError,
    Request,
    RequestError,
    RequestOutput,
)
from megatron.core.inference.sampling_params import SamplingParams

if TYPE_CHECKING:  # the front end imports no torch
    from megatron.core.inference.paged_engine.engine import Engine

VERSION = 3
MAX_BYTES = 64 << 20  # of one message; a request body is smaller
_REQUEST_FIELDS = ("request_id", "prompt", "source", "grammar", "fork_of")


class ProtocolError(MegatronError):
    """A message that this version does not understand."""


@dataclass(frozen=True)
class EngineInfo:
    """Facts about the engine and its model for the front end.

    ``tokenizer``: fields of `TokenizerSpec`.  ``modules``: user modules to import, which may
    register tokenizers.  ``decoder_start``: the first token of a decoder whose encoder reads the
    prompt.  ``features``: "grammar" and "update_weights", if the engine has them.  ``images``:
    fields of `ImageInput`, for models that read images.
    """

    model: str
    tokenizer: dict[str, Any]
    vocab_size: int
    max_sequence_length: int
    eod: int | None
    decoder_start: int | None = None
    modules: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    images: dict[str, Any] | None = None


def encode(kind: str, **content: object) -> bytes:
    """Return one line.  Raises ProtocolError if it is too long."""
    line = json.dumps({"type": kind, **content}, separators=(",", ":")).encode() + b"\n"
    if len(line) > MAX_BYTES:
        raise ProtocolError(f"a {kind} message has {len(line)} bytes, at most {MAX_BYTES}")
    return line


def decode(line: bytes) -> dict[str, Any]:
    """Return the message of one line.  Raises ProtocolError."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a message is no JSON: {error}") from error
    if not isinstance(found, dict) or not isinstance(found.get("type"), str):
        raise ProtocolError("a message is no object with a type")
    return found


@dataclass
class LineBuffer:
    """Bytes of a socket, cut into lines."""

    _parts: list[bytes] = field(default_factory=list)
    _size: int = 0

    def add(self, data: bytes) -> list[bytes]:
        """Return the lines that ``data`` completes.  Raises ProtocolError for one too long."""
        if b"\n" not in data:
            self._keep(data)
            return []
        *lines, rest = data.split(b"\n")
        lines[0] = b"".join([*self._parts, lines[0]])
        self._parts.clear()
        self._size = 0
        self._keep(rest)
        return lines

    def _keep(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > MAX_BYTES:
            raise ProtocolError(f"a message has more than {MAX_BYTES} bytes")
        self._parts.append(data)


def hello_line(info: EngineInfo) -> bytes:
    """Return the first message of the engine."""
    return encode("hello", version=VERSION, info=asdict(info))


def read_hello(message: Mapping[str, Any]) -> EngineInfo:
    """Return the content of `hello_line`.  Raises ProtocolError for another version."""
    if message["type"] != "hello" or message.get("version") != VERSION:
        raise ProtocolError(
            f"the engine speaks version {message.get('version')} of the messages, this front end "
            f"{VERSION}: start both from one installation"
        )
    info = dict(message["info"])
    return EngineInfo(
        **{**info, "modules": tuple(info["modules"]), "features": tuple(info["features"])}
    )


def request_to_json(request: Request) -> dict[str, Any]:
    """Return a request as JSON values."""
    fields = {name: getattr(request, name) for name in _REQUEST_FIELDS}
    params = request.params.to_json()
    images = [image.to_json() for image in request.images]
    beam = request.beam and asdict(request.beam)
    return {**fields, "params": params, "beam": beam, "images": images}


def request_from_json(found: Mapping[str, Any]) -> Request:
    """Return the request that `request_to_json` wrote.  Raises ConfigError for bad parameters."""
    fields = {name: found[name] for name in _REQUEST_FIELDS}
    if fields["grammar"] is not None:
        fields["grammar"] = tuple(fields["grammar"])
    beam = found["beam"] and BeamParams(**found["beam"])
    images = tuple(map(PromptImage.from_json, found["images"]))
    params = SamplingParams.from_json(found["params"])
    return Request(**fields, params=params, beam=beam, images=images)


_READ_BYTES = 1 << 20
_PREPARING_WAIT_S = 0.002  # of an idle engine, for grammars that are being compiled


UpdateWeights = Callable[[str], int]  # path of a checkpoint -> the new weight version


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


class EngineLoop:
    """Serve the requests that arrive over ``connection`` until its other end is closed.

    An exception of a step ends the loop, after the front end has received the message that
    ``explain`` gives for it.
    """

    def __init__(
        self,
        engine: Engine,
        connection: socket.socket,
        info: EngineInfo,
        update_weights: UpdateWeights | None = None,
        explain: Callable[[BaseException], str] = _described,
    ) -> None:
        self._explain = explain
        self._engine = engine
        self._connection = connection
        self._info = info
        self._update_weights = update_weights
        self._buffer = LineBuffer()
        self._open: set[str] = set()
        self._preparing: dict[str, Request] = {}  # by id, in the order of their arrival

    def run(self) -> None:
        """Return when the front end has closed the connection."""
        try:
            self._connection.sendall(hello_line(self._info))
            with selectors.DefaultSelector() as selector:
                selector.register(self._connection, selectors.EVENT_READ)
                while self._read(selector):
                    self._add_prepared()
                    if self._engine.has_unfinished:
                        self._step()
        except (BrokenPipeError, ConnectionResetError):
            pass  # the front end ended while this process was writing
        except Exception as error:
            with contextlib.suppress(OSError):  # the front end may have ended too
                self._send("failed", message=self._explain(error))
            raise
        for request_id in self._open:
            self._engine.abort(request_id)

    def _read(self, selector: selectors.BaseSelector) -> bool:
        """Handle messages, waiting for one if the engine is idle; False: no more will come."""
        wait_s = _PREPARING_WAIT_S if self._preparing else None
        wait_s = 0 if self._engine.has_unfinished else wait_s
        if not selector.select(wait_s):
            return True
        data = self._connection.recv(_READ_BYTES)
        for line in self._buffer.add(data):
            self._handle(decode(line))
        return bool(data)

    def _step(self) -> None:
        outputs = self._engine.step()
        if not outputs:
            return
        for output in outputs:
            if output.finish_reason is not None:
                self._open.discard(output.request_id)
        # Several long outputs may exceed the limit of a message.
        short = []
        for output in outputs:
            if output.prompt_scores or output.beams:
                self._send("outputs", items=[output.to_json()])
            else:
                short.append(output.to_json())
        if short:
            self._send("outputs", items=short)

    def _handle(self, message: dict[str, Any]) -> None:
        kind = message["type"]
        if kind == "add":
            self._add(message)
        elif kind == "abort":
            self._preparing.pop(message["id"], None)
            if message["id"] in self._open:
                self._open.discard(message["id"])
                self._engine.abort(message["id"])
        elif kind == "stats":
            found = dataclasses.asdict(self._engine.stats())
            self._send("stats", call=message["call"], values=found)
        elif kind == "ping":
            self._send("pong", call=message["call"])
        elif kind == "update_weights":
            self._update(message)
        else:
            raise ProtocolError(f"message of the unknown type {kind!r}")

    def _add_prepared(self) -> None:
        """Add the requests whose grammars have been compiled; refuse those that cannot run."""
        for request_id, request in list(self._preparing.items()):
            try:
                if not self._engine.prepare(request):
                    continue
                self._engine.add(request)
            except MegatronError as error:
                self._refuse(request_id, error)
            else:
                self._open.add(request_id)
                self._send("accepted", id=request_id)
            del self._preparing[request_id]

    def _add(self, message: dict[str, Any]) -> None:
        request_id = message["request"]["request_id"]
        try:
            self._preparing[request_id] = request_from_json(message["request"])
        except MegatronError as error:
            self._refuse(request_id, error)
        else:
            self._add_prepared()

    def _refuse(self, request_id: str, error: MegatronError) -> None:
        reason = "queue_full" if isinstance(error, QueueFullError) else "request"
        param = error.param if isinstance(error, RequestError) else None
        self._send("refused", id=request_id, reason=reason, message=str(error), param=param)

    def _update(self, message: dict[str, Any]) -> None:
        """Replace the weights; with an error message, the old ones stay."""
        error = ""
        version = None
        if self._update_weights is None:
            error = "this engine cannot update its weights"
        else:
            try:
                version = self._update_weights(message["load"])
            except MegatronError as found:
                error = str(found)
        self._send("updated", call=message["call"], error=error, version=version)

    def _send(self, kind: str, **content: object) -> None:
        self._connection.sendall(encode(kind, **content))


class EngineDied(MegatronError):
    """The engine ended, or a step of it failed."""


class EngineClient:
    """Requests to the engine, and its answers."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.calls: dict[str, Call] = {}  # by id of unfinished requests
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._numbers = itertools.count()
        self._flush_lock = asyncio.Lock()
        self.failure: str | None = None

    async def hello(self) -> EngineInfo:
        """Return the first message.  Raises EngineDied if the engine ends before it."""
        line = await self._reader.readline()
        if not line:
            raise EngineDied("the engine ended before its model was loaded")
        return read_hello(decode(line))

    async def read_until_the_end(self) -> str:
        """Sort messages to their calls until the engine ends; return why it did."""
        message = "the engine's process has ended"
        try:
            while line := await self._reader.readline():
                found = decode(line)
                if found["type"] == "failed":
                    message = f"the engine failed: {found['message']}"
                    break
                self._dispatch(found)
                # A line that has already arrived is returned without a pause: let others run.
                await asyncio.sleep(0)
        except (OSError, ValueError, ProtocolError) as error:
            message = f"the connection to the engine failed: {error}"
        self.failure = message
        for call in {*self.calls.values()}:
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
        self._writer.write(encode(kind, **content))

    async def flush(self) -> None:
        """Let the engine receive the messages sent, and other tasks run.  Raises EngineDied."""
        try:
            async with self._flush_lock:  # one task can wait at a time in Python 3.10
                await self._writer.drain()
        except OSError as error:
            raise EngineDied(f"the connection to the engine failed: {error}") from None
        await asyncio.sleep(0)  # drain() makes no pause if little is unsent

    def close(self) -> None:
        """End the connection, and with it the engine."""
        self._writer.close()

    def _dispatch(self, message: Mapping[str, Any]) -> None:
        kind = message["type"]
        if kind == "outputs":
            for item in message["items"]:
                call = self.calls.get(item["request_id"])
                if call is not None:  # else aborted while the step ran
                    call.put(RequestOutput.from_json(item))
        elif kind in ("accepted", "refused"):
            error: MegatronError | None = None
            if kind == "refused" and message["reason"] == "queue_full":
                error = QueueFullError(message["message"])
            elif kind == "refused":
                error = RequestError(message["message"], message["param"])
            call = self.calls.get(message["id"])
            if call is not None:
                call.put(error)
        else:
            answer = self._answers.get(message["call"])
            if answer is not None and not answer.done():
                answer.set_result(dict(message))


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
                self._client.calls[request.request_id] = self
                self._client.send("add", request=request_to_json(request))
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
                    self._client.calls.pop(item.request_id, None)
                yield item
                # Without a pause for each output, a client that has left is not noticed.
                await asyncio.sleep(0)

    def finish(self, request_id: str) -> None:
        """Abort one request: no more of it is wanted."""
        if request_id in self._open:
            self._open.discard(request_id)
            self._client.calls.pop(request_id, None)
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
