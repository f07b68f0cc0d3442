"""Start the HTTP front end of a server as a process of its own.

The process that calls this holds the engine.
"""

from __future__ import annotations

import argparse
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.core.config.errors import LaunchError
from megatron.core.limited_processes import Main
from megatron.core.optional import require
from megatron.inference.server.chat_formats import REASONING_PARSERS, TOOL_PARSERS
from megatron.inference.server.engine_link import EngineInfo, EngineLoop

if TYPE_CHECKING:
    from megatron.core.inference.paged_engine.engine import Engine

ROOT = str(Path(__file__).resolve().parents[2])
_FRONT_END = """
import sys
sys.path[0] = sys.argv.pop(1)
from megatron.inference.server.front_end import main
sys.exit(main(sys.argv[1]))
"""
_WORKER = """
import importlib, socket, sys
sys.path[0] = sys.argv.pop(1)
importlib.import_module(sys.argv[1]).main(socket.socket(fileno=int(sys.argv[2])))
"""
_PACKAGES = ("starlette", "uvicorn")  # of the front end
_END_TIMEOUT_S = 10.0  # for a front end whose connection to the engine has ended


def add_front_end_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the front end."""
    group = parser.add_argument_group("server")
    group.add_argument("--port", type=int, default=5000, help="port to listen on; 0: any free one")
    group.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; 0.0.0.0: all networks"
    )
    group.add_argument(
        "--api-key-file", help="file with the keys that clients may send, one a line"
    )
    group.add_argument(
        "--allowed-local-media-path",
        help="folder with images that clients may name as file:///...; default: none",
    )
    group.add_argument("--served-model-name", help="name of the model in the API")
    for flag, what, parsers in (
        ("--tool-call-parser", "calls of tools", TOOL_PARSERS),
        ("--reasoning-parser", "reasoning", REASONING_PARSERS),
    ):
        group.add_argument(
            flag,
            choices=parsers,
            help=f"format in which the model writes {what}; default: that of its chat template",
        )


class FrontEndProcess:
    """The HTTP front end: a process, and the socket that connects it to the engine.

    Both processes notice the end of the other at the end of the socket.  The constructor raises
    MissingDependency or LaunchError.
    """

    def __init__(self, host: str, port: int, **options: object) -> None:
        for package in _PACKAGES:
            require(package, "the server")
        listener = listen(host, port)
        self.connection, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        numbers = {"engine_fd": other.fileno(), "listen_fd": listener.fileno()}
        given = json.dumps({**numbers, "host": host, **options})
        self._process = subprocess.Popen(
            [sys.executable, "-c", _FRONT_END, ROOT, given], pass_fds=tuple(numbers.values())
        )
        other.close()
        listener.close()

    def serve(self, engine: Engine, info: EngineInfo, **options: Any) -> int:
        """Serve until SIGTERM or SIGINT; return the front end's exit status.

        The front end receives the signal, answers its open requests and closes the connection.
        ``options`` are arguments of `EngineLoop`.
        """
        with self._forwarded_signals():
            EngineLoop(engine, self.connection, info, **options).run()
            return self.close()

    def close(self) -> int:
        """Close the connection; return the exit status of the process."""
        self.connection.close()
        try:
            return self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    @contextmanager
    def _forwarded_signals(self) -> Iterator[None]:
        def forward(number: int, frame: object) -> None:
            self._process.send_signal(signal.SIGTERM)

        old = {n: signal.signal(n, forward) for n in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)


def start_worker(main: Main, control: socket.socket) -> subprocess.Popen[bytes]:
    """Start a process that runs ``main(control)`` and imports nothing of this one."""
    return subprocess.Popen(
        [sys.executable, "-c", _WORKER, ROOT, main.__module__, str(control.fileno())],
        pass_fds=(control.fileno(),),
    )


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens.  Raises LaunchError if the address cannot be used."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        raise LaunchError(f"--host {host} --port {port}: {error}; choose another") from None
