"""The loop of the process that holds the engine: read messages, step, report.

Between two steps it reads the messages that have arrived; an idle engine waits for the next one.
The end of the socket is the end of the front end: open requests are aborted and the loop ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import selectors
import socket
from collections.abc import Callable
from typing import Any, Protocol

from megatron.core.config.errors import MegatronError
from megatron.core.inference.paged_engine.request import (
    QueueFullError,
    Request,
    RequestError,
    RequestOutput,
)
from megatron.inference.server import messages
from megatron.inference.server.messages import EngineInfo, LineBuffer

_READ_BYTES = 1 << 20
_PREPARING_WAIT_S = 0.002  # of an idle engine, for grammars that are being compiled


class ServedEngine(Protocol):
    """What the loop calls of an engine."""

    def prepare(self, request: Request) -> bool: ...
    def add(self, request: Request) -> None: ...
    def abort(self, request_id: str) -> bool: ...
    def step(self) -> list[RequestOutput]: ...
    @property
    def has_unfinished(self) -> bool: ...
    def stats(self) -> Any: ...  # a dataclass of numbers


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
        engine: ServedEngine,
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
            self._connection.sendall(messages.hello(self._info))
            with selectors.DefaultSelector() as selector:
                selector.register(self._connection, selectors.EVENT_READ)
                while self._read(selector):
                    self._add_prepared()
                    if self._engine.has_unfinished:
                        self._step()
        except (BrokenPipeError, ConnectionResetError):
            pass  # the front end ended while this process was writing
        except Exception as error:
            self._report_failure(self._explain(error))
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
            self._handle(messages.decode(line))
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
            raise messages.ProtocolError(f"message of the unknown type {kind!r}")

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
            self._preparing[request_id] = messages.request_from_json(message["request"])
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
        self._connection.sendall(messages.encode(kind, **content))

    def _report_failure(self, message: str) -> None:
        with contextlib.suppress(OSError):  # the front end may have ended too
            self._send("failed", message=message)
