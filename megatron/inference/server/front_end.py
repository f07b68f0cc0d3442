"""The main program of the front end's process.

The engine's process starts it with two open sockets: one to the engine, and the one that listens
for clients.  It ends when the engine ends, or after SIGTERM when all open requests are answered or
the limit for them has passed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from megatron.core.chat_templates import read_chat_template
from megatron.core.config.errors import ConfigError, MegatronError
from megatron.core.optional import require
from megatron.inference.server.app import FrontEnd
from megatron.inference.server.chat_formats import REASONING_PARSERS, TOOL_PARSERS, detect
from megatron.inference.server.chat_images import ImageFiles
from megatron.inference.server.engine_link import MAX_BYTES, EngineClient, EngineDied
from megatron.inference.server.generation import Metrics, Service
from megatron.inference.server.http import IdleConnections, Protocol, is_loopback
from megatron.inference.server.model import ChatTemplate, Model
from megatron.training.process.user_code import problems_of_imports
from megatron.training.tokenizer.multimodal_tokenizer import MultimodalTokenizer
from megatron.training.tokenizer.sft_tokenizer import SFTTokenizer

uvicorn = require("uvicorn", "the server")
_UvicornServer: Any = uvicorn.Server

_LOG = logging.getLogger(__name__)
_LAST_ANSWERS_S = 4  # for answers that are being sent when the server ends
_PATIENCE_S = 30.0  # with an engine that has requests, for an answer between two steps


@dataclass(frozen=True)
class FrontEndOptions:
    """Options that the engine's process passes, as JSON."""

    engine_fd: int
    listen_fd: int
    host: str = ""  # the value of --host
    api_key_file: str | None = None
    chat_template: str | None = None
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    allowed_local_media_path: str | None = None
    max_body_bytes: int = 8 << 20
    max_api_tokens: int = 12000  # of prompts and answers of one PUT /api
    drain_limit_s: float = 60.0  # for open requests after SIGTERM
    header_limit_s: float = 15.0  # for the headers of a request
    unread_limit_s: float = 60.0  # for a client that reads nothing of its answer


def main(options: str) -> str | None:
    """Serve until the end; return the error message if it is not a drained one."""
    logging.basicConfig(level=logging.INFO, format="front end: %(message)s")
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # it warns of clients that have left
    try:
        asyncio.run(serve(FrontEndOptions(**json.loads(options))))
    except MegatronError as error:
        return f"{type(error).__name__}: {error}"
    return None


async def serve(options: FrontEndOptions) -> None:
    """Connect to the engine and to clients.  Raises EngineDied if the engine ends first."""
    listener = socket.socket(fileno=options.listen_fd)
    reader, writer = await asyncio.open_unix_connection(
        sock=socket.socket(fileno=options.engine_fd), limit=MAX_BYTES
    )
    client = EngineClient(reader, writer)
    is_local = is_loopback(listener.getsockname()[0])
    front_end = FrontEnd(
        read_keys(options.api_key_file), options.max_body_bytes, options.host if is_local else None
    )
    server = _Server(
        uvicorn.Config(
            front_end,
            http=Protocol,  # the same limits and refusals wherever other parsers are installed
            lifespan="off",
            proxy_headers=False,
            ws="none",
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_LAST_ANSWERS_S,
        )
    )
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    work = asyncio.ensure_future(server.serve(sockets=[listener]))
    engine = asyncio.ensure_future(_follow_engine(client, front_end, options, listener))
    connections = server.server_state.connections
    drained = asyncio.ensure_future(_drained(stop, front_end, options.drain_limit_s, connections))
    idle = IdleConnections(options.header_limit_s, options.unread_limit_s, time.monotonic)
    watch = asyncio.ensure_future(idle.end_for_ever(connections))
    await asyncio.wait({work, engine, drained}, return_when=asyncio.FIRST_COMPLETED)
    server.should_exit = True
    await work
    watch.cancel()
    if front_end.service is not None:
        front_end.service.close()
    writer.close()
    if engine.done():
        raise EngineDied(engine.result())


async def _follow_engine(
    client: EngineClient, front_end: FrontEnd, options: FrontEndOptions, listener: socket.socket
) -> str:
    """Serve requests as soon as the engine is ready; return why it ended."""
    files = ImageFiles(options.allowed_local_media_path)
    info = await client.hello()
    ConfigError.raise_for(problems_of_imports(info.modules))
    model = await asyncio.to_thread(Model.of, info)
    source, tokens = read_chat_template(
        options.chat_template, info.tokenizer.get("tokenizer_model")
    )
    if isinstance(model.tokenizer, MultimodalTokenizer):
        of_format, tokens = model.tokenizer.chat_template()
        source = of_format if options.chat_template is None else source
    elif isinstance(model.tokenizer, SFTTokenizer) and options.chat_template is None:
        source = model.tokenizer.chat.source
    template = None if source is None else ChatTemplate(source, tokens)
    calls, reasoning = detect(source)
    front_end.service = Service(
        client,
        model,
        Metrics(),
        template,
        files,
        options.max_api_tokens,
        TOOL_PARSERS[options.tool_call_parser or calls],
        REASONING_PARSERS[options.reasoning_parser or reasoning],
    )
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    print(f"serving {info.model} on http://{shown}:{port}", flush=True)
    watch = asyncio.ensure_future(watch_engine(client, _PATIENCE_S))
    try:
        return await client.read_until_the_end()
    finally:
        watch.cancel()


async def watch_engine(client: EngineClient, patience_s: float) -> None:
    """Log when the engine does not answer although it has requests; ends with the engine."""
    while client.failure is None:
        await asyncio.sleep(patience_s)
        if not client.calls:
            continue
        try:
            await client.ask("ping", patience_s)
        except TimeoutError:
            _LOG.error(
                "rank 0 (process %d), which holds the engine, has not answered for %g s: it is "
                "stopped, computes a long step, or waits for another rank",
                os.getppid(),
                patience_s,
            )
        except EngineDied:
            return


async def _drained(
    stop: asyncio.Event, front_end: FrontEnd, limit_s: float, connections: Iterable[Any]
) -> None:
    await stop.wait()
    num_open = await front_end.drain(limit_s)
    if num_open:
        _LOG.warning("%d requests are not answered %g s after SIGTERM: they end", num_open, limit_s)
        for connection in tuple(connections):
            connection.transport.abort()  # its request ends as if the client had left


def read_keys(path: str | None) -> list[str]:
    """Return the keys of --api-key-file, one a line.  Raises ConfigError."""
    if path is None:
        return []
    try:
        with open(path, encoding="utf-8") as file:
            keys = [line.strip() for line in file if line.strip()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"--api-key-file {path}: {error}; give a file of keys") from None
    if not keys:
        raise ConfigError(f"--api-key-file {path} holds no key; write one a line")
    return keys


class _Server(_UvicornServer):  # type: ignore[misc]
    """uvicorn without its handlers of signals: `serve` handles them."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
