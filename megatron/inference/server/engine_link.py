"""The connection between front end and engine: its messages, and the loops at both ends.

Messages are JSON objects, one a line, over a Unix socket.  To the engine: add, abort, and those
with an answer: stats, ping, is_paused, pause, resume, update_weights, reset_prefix_cache,
load_adapter, unload_adapter.  From it: hello (first), accepted, refused, output (of one request in
one step), answer, failed.

`EngineLoop` runs in the engine's process: between two steps it reads the messages that have
arrived; an idle engine waits for the next one.  The end of the socket is the end of the front end:
open requests are aborted and the loop ends.  `EngineClient` is the front end's side, for asyncio:
one task reads all messages and sorts them to the calls that wait for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import selectors
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from megatron.core.config.errors import MegatronError
from megatron.core.inference.paged_engine.request import (
    BeamParams,
    Pooling,
    PromptImage,
    QueueFullError,
    Request,
    RequestError,
    RequestOutput,
)
from megatron.core.inference.sampling_params import SamplingParams

if TYPE_CHECKING:  # the front end imports no torch
    from megatron.core.inference.paged_engine.engine import Engine

MAX_BYTES = 64 << 20  # of one message; a request body is smaller
_REQUEST_FIELDS = (
    *("request_id", "prompt", "source", "grammar", "fork_of", "cache_salt", "adapter", "pooling"),
)
_READ_BYTES = 1 << 20
_PREPARING_WAIT_S = 0.002  # of an idle engine, for grammars that are being compiled


@dataclass(frozen=True)
class EngineInfo:
    """Facts about the engine and its model for the front end.

    ``tokenizer``: fields of `TokenizerSpec`.  ``modules``: user modules to import, which may
    register tokenizers.  ``decoder_start``: the first token of a decoder whose encoder reads the
    prompt.  ``features``: "grammar", "control" and "runtime_adapters", if the engine has them.
    ``images``: fields of `ImageInput`, for models that read images.  ``adapters``: name -> folder
    of those that are loaded.  ``vector_size`` and ``pooling`` of vectors of texts.
    """

    model: str
    tokenizer: dict[str, Any]
    vocab_size: int
    max_sequence_length: int
    eod: int | None
    decoder_start: int | None = None
    modules: Sequence[str] = ()
    features: Sequence[str] = ()
    images: dict[str, Any] | None = None
    adapters: Mapping[str, str] = field(default_factory=dict)
    vector_size: int = 0
    pooling: Pooling = "last"


def encode(kind: str, **content: object) -> bytes:
    """Return a message as one line."""
    return json.dumps({"type": kind, **content}, separators=(",", ":")).encode() + b"\n"


def request_to_json(request: Request) -> dict[str, Any]:
    """Return a request as JSON values."""
    return {
        **{name: getattr(request, name) for name in _REQUEST_FIELDS},
        "params": request.params.to_json(),
        "beam": request.beam and asdict(request.beam),
        "images": [image.to_json() for image in request.images],
    }


def request_from_json(found: Mapping[str, Any]) -> Request:
    """Return the request that `request_to_json` wrote."""
    parsed = {
        "grammar": found["grammar"] and tuple(found["grammar"]),
        "params": SamplingParams.from_json(found["params"]),
        "beam": found["beam"] and BeamParams(**found["beam"]),
        "images": tuple(map(PromptImage.from_json, found["images"])),
    }
    return Request(**{**found, **parsed})


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
        explain: Callable[[BaseException], str] = repr,
    ) -> None:
        self._explain = explain
        self._engine = engine
        self._connection = connection
        self._info = info
        self._received = bytearray()  # the beginning of a line
        self._open: set[str] = set()
        self._preparing: dict[str, Request] = {}  # by id, in the order of their arrival
        self._is_paused = False
        self._pauses: list[dict[str, Any]] = []  # that wait for the end of open requests

    def run(self) -> None:
        """Return when the front end has closed the connection."""
        try:
            self._send("hello", info=asdict(self._info))
            with selectors.DefaultSelector() as selector:
                selector.register(self._connection, selectors.EVENT_READ)
                while self._read(selector):
                    self._add_prepared()
                    if self._is_busy:
                        self._step()
                    elif self._pauses and not self._preparing:
                        self._pause_now()
        except (BrokenPipeError, ConnectionResetError):
            pass  # the front end ended while this process was writing
        except Exception as error:
            with contextlib.suppress(OSError):  # the front end may have ended too
                self._send("failed", message=self._explain(error))
            raise
        for request_id in self._open:
            self._engine.abort(request_id)

    @property
    def _is_busy(self) -> bool:
        return self._engine.has_unfinished and not self._is_paused

    def _read(self, selector: selectors.BaseSelector) -> bool:
        """Handle messages, waiting for one if the engine is idle; False: no more will come."""
        wait_s = _PREPARING_WAIT_S if self._preparing or self._pauses else None
        if not selector.select(0 if self._is_busy else wait_s):
            return True
        data = self._connection.recv(_READ_BYTES)
        self._received += data
        if b"\n" in data:
            *lines, self._received = self._received.split(b"\n")
            for line in lines:
                self._handle(json.loads(line))
        return bool(data)

    def _step(self) -> None:
        outputs = self._engine.step()
        self._open.difference_update(o.request_id for o in outputs if o.finish_reason is not None)
        lines = (encode("output", id=o.request_id, item=o) for o in outputs)
        self._connection.sendall(b"".join(lines))

    def _handle(self, message: dict[str, Any]) -> None:
        kind = message["type"]
        if kind == "add":
            request = request_from_json(message["request"])
            self._preparing[request.request_id] = request
        elif kind == "abort":
            self._preparing.pop(message["id"], None)
            self._open.discard(message["id"])
            self._engine.abort(message["id"])
        elif kind == "pause":
            self._pauses.append(message)
            if message["mode"] == "abort":
                self._abort_all()
            if message["mode"] != "wait":
                self._pause_now()
        else:
            self._send("answer", call=message["call"], **self._answer(message))

    def _answer(self, message: dict[str, Any]) -> dict[str, object]:
        kind = message["type"]
        if kind == "stats":
            return asdict(self._engine.stats())
        if kind == "resume":
            self._pause_now()  # for those who still wait for it
            self._is_paused = False
        elif kind == "is_paused":
            return {"is_paused": self._is_paused}
        elif kind == "reset_prefix_cache":
            self._engine.reset_prefix_cache()
        elif kind == "unload_adapter":
            self._engine.unload_adapter(message["name"])
        try:
            if kind == "update_weights":
                return {"version": self._engine.update_weights(message["load"])}
            if kind == "load_adapter":
                self._engine.load_adapter(message["name"], message["path"])
        except MegatronError as error:  # the old weights stay
            return {"error": str(error)}
        return {}

    def _pause_now(self) -> None:
        """Stop steps, and answer those who have asked for it."""
        self._is_paused = True
        if any(message["clears"] for message in self._pauses):
            self._engine.reset_prefix_cache()
        for message in self._pauses:
            self._send("answer", call=message["call"])
        self._pauses.clear()

    def _abort_all(self) -> None:
        """End all requests; their clients get what there is, with the reason "abort"."""
        for request_id in self._preparing:
            self._send("accepted", id=request_id)
        for request_id in (*self._open, *self._preparing):
            self._engine.abort(request_id)
            item = RequestOutput(request_id, finish_reason="abort")
            self._send("output", id=request_id, item=item)
        self._open.clear()
        self._preparing.clear()

    def _add_prepared(self) -> None:
        """Add the requests whose grammars have been compiled; refuse those that cannot run."""
        for request_id, request in list(self._preparing.items()):
            try:
                if not self._engine.prepare(request):
                    continue
                self._engine.add(request)
                self._open.add(request_id)
                self._send("accepted", id=request_id)
            except MegatronError as error:
                param = error.param if isinstance(error, RequestError) else None
                is_full = isinstance(error, QueueFullError)
                reason = {"message": str(error), "param": param, "is_full": is_full}
                self._send("refused", id=request_id, **reason)
            del self._preparing[request_id]

    def _send(self, kind: str, **content: object) -> None:
        self._connection.sendall(encode(kind, **content))


class EngineDied(MegatronError):
    """The engine ended, or a step of it failed."""


class Call:
    """Messages of the engine about the requests of one HTTP request."""

    def __init__(self) -> None:
        # For each request an error, or None if it is accepted; then outputs.
        self.answers: asyncio.Queue[MegatronError | None] = asyncio.Queue()
        self.outputs: asyncio.Queue[RequestOutput | MegatronError] = asyncio.Queue()


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
        self.refuses_requests = False  # while it is paused

    async def hello(self) -> EngineInfo:
        """Return the first message.  Raises EngineDied if the engine ends before it."""
        line = await self._reader.readline()
        if not line:
            raise EngineDied("the engine ended before its model was loaded")
        return EngineInfo(**json.loads(line)["info"])

    async def read_until_the_end(self) -> str:
        """Sort messages to their calls until the engine ends; return why it did."""
        message = "the engine's process has ended"
        try:
            while line := await self._reader.readline():
                found = json.loads(line)
                if found["type"] == "failed":
                    message = f"the engine failed: {found['message']}"
                    break
                self._dispatch(found)
                # A line that has already arrived is returned without a pause: let others run.
                await asyncio.sleep(0)
        except (OSError, ValueError) as error:
            message = f"the connection to the engine failed: {error}"
        self.failure = message
        for call in {*self.calls.values()}:
            call.answers.put_nowait(EngineDied(message))
            call.outputs.put_nowait(EngineDied(message))
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(EngineDied(message))
        return message

    async def ask(self, kind: str, timeout_s: float, **content: object) -> dict[str, Any]:
        """Send a message that is no request; return the answer.

        Raises EngineDied, or TimeoutError if the engine does not answer in time.
        """
        number = next(self._numbers)
        self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            self.send(kind, call=number, **content)
            return await asyncio.wait_for(self._answers[number], timeout_s)
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

    def _dispatch(self, message: dict[str, Any]) -> None:
        kind = message["type"]
        if kind == "answer":
            answer = self._answers.get(message.pop("call"))
            if answer is not None and not answer.done():
                answer.set_result(message)
            return
        call = self.calls.get(message["id"])
        if call is None:
            return  # it was aborted while the step ran
        if kind == "output":
            call.outputs.put_nowait(RequestOutput.from_json(message["item"]))
        elif kind == "accepted":
            call.answers.put_nowait(None)
        elif message["is_full"]:
            call.answers.put_nowait(QueueFullError(message["message"]))
        else:
            call.answers.put_nowait(RequestError(message["message"], message["param"]))
