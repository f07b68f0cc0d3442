"""Fork a process for each program of a client: python -m tests.support.forked.server FD FD.

The arguments are file descriptors: a listening socket, and a pipe whose other end the test session
holds.  The server imports torch and megatron, runs no operation of torch, and starts no thread.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import os
import random
import runpy
import selectors
import shutil
import signal
import socket
import sys
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.preload import preload_package
from tests.support.program_end import end, status_of

PRELOADED = ("torch.distributed.run", "torch.utils.data", "starlette", "uvicorn")
# A program imports this module for its effects: it imports it again.
WITH_EFFECTS = "megatron.training.process.early_sigterm"
_MOST_DESCRIPTORS = 64
_FIRST_FREE = 256  # number that no client gives a file descriptor


@dataclass
class Program:
    """A program that runs; its client waits for its exit status, unless it was killed."""

    pid: int
    client: socket.socket | None


class Server:
    """Fork programs until the test session ends.

    `serve` returns in each forked process, with the function that runs the program.
    """

    def __init__(self, listener: socket.socket, session: int) -> None:
        self._listener = listener
        self._session = session
        self._programs: dict[int, Program] = {}
        self._selector = selectors.DefaultSelector()
        self._wakeup, self._wake = socket.socketpair()
        self._wake.setblocking(False)

    def serve(self) -> Callable[[], None]:
        """Fork programs; return, in a forked process, the function that runs its program."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake.fileno())
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        self._selector.register(self._session, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj == self._session:
                    self._end()
                if key.fileobj is self._listener:
                    run = self._fork(self._listener.accept()[0])
                    if run is not None:
                        return run
                elif key.fileobj is self._wakeup:
                    self._wakeup.recv(4096)
                    self._report_ends()
                else:
                    self._forward(key.data)

    def _fork(self, connection: socket.socket) -> Callable[[], None] | None:
        start, received, _, _ = socket.recv_fds(connection, 8, _MOST_DESCRIPTORS)
        content = b""
        while len(content) < int.from_bytes(start, "big"):
            content += connection.recv(1 << 20)
        pid = os.fork()
        if pid == 0:
            self._leave(connection)
            command = json.loads(content)
            return lambda: run_program(received, **command)
        for number in received:
            os.close(number)
        with contextlib.suppress(OSError):  # the client was killed just now
            connection.sendall(f"{pid}\n".encode())
        self._programs[pid] = Program(pid, connection)
        self._selector.register(connection, selectors.EVENT_READ, self._programs[pid])
        return None

    def _leave(self, connection: socket.socket) -> None:
        """Close in a forked process what belongs to the server."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._selector.close()
        clients = (program.client for program in self._programs.values())
        for each in (connection, self._listener, self._wakeup, self._wake, *clients):
            if each is not None:
                each.close()
        os.close(self._session)

    def _report_ends(self) -> None:
        for pid in list(self._programs):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                client = self._programs.pop(pid).client
                if client is not None:
                    self._selector.unregister(client)
                    with contextlib.suppress(OSError):  # the client was killed just now
                        client.sendall(str(os.waitstatus_to_exitcode(status)).encode())
                    client.close()

    def _forward(self, program: Program) -> None:
        """Send the signals of a client to its program; kill the program of a killed client."""
        if program.client is None or program.pid not in self._programs:
            return
        numbers = b""
        with contextlib.suppress(OSError):
            numbers = program.client.recv(64)
        for number in numbers:
            os.kill(program.pid, number)
        if not numbers:
            self._selector.unregister(program.client)
            program.client.close()
            program.client = None
            with contextlib.suppress(ProcessLookupError):  # it has not begun its session
                os.killpg(program.pid, signal.SIGKILL)
            os.kill(program.pid, signal.SIGKILL)

    def _end(self) -> None:
        for pid in self._programs:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        shutil.rmtree(Path(self._listener.getsockname()).parent, ignore_errors=True)
        end(0)


def run_program(
    received: list[int],
    descriptors: list[int],
    argv: list[str],
    cwd: str,
    environ: dict[str, str],
) -> None:
    """Run a program in this process as an interpreter with the arguments ``argv`` does.

    ``received`` are the client's file descriptors, which have the numbers ``descriptors`` there.
    """
    os.setsid()
    apart = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE) for number in received]
    for number in received:
        os.close(number)
    for number, copy in zip(descriptors, apart, strict=True):
        os.dup2(copy, number)
        os.close(copy)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environ)
    random.seed()
    if argv[0] == "-u":
        del argv[0]
        os.environ["PYTHONUNBUFFERED"] = "1"
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=bool(os.environ.get("PYTHONUNBUFFERED")))
    sys.modules.pop(WITH_EFFECTS, None)
    main: Any = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    if argv[0] == "-m":
        sys.path[0] = cwd
        sys.argv = argv[1:]
        warnings.filterwarnings("ignore", module="runpy")  # the module is imported already
        runpy._run_module_as_main(argv[1])  # type: ignore[attr-defined]
    elif argv[0] == "-c":
        sys.path[0] = ""
        sys.argv = ["-c", *argv[2:]]
        main.__builtins__ = __builtins__
        exec(argv[1], main.__dict__)
    else:
        script = Path(argv[0])
        sys.path[0] = str(script.resolve().parent)
        sys.argv = argv
        main.__file__ = argv[0]
        main.__builtins__ = __builtins__
        exec(compile(script.read_bytes(), argv[0], "exec"), main.__dict__)


def main() -> None:
    """Import, serve, and run the program in each forked process."""
    listener, session = (int(word) for word in sys.argv[1:])
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            __import__(name)
    preload_package("tools")
    gc.freeze()
    program = Server(socket.socket(fileno=listener), session).serve()
    end(status_of(program))  # to finalize all imported modules would take as long as the imports


if __name__ == "__main__":
    main()
