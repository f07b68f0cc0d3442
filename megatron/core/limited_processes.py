"""Processes for untrusted work, each with limits on time and memory.

Whoever has the work keeps a `LimitedProcesses`.  It starts one process, which imports what the work
needs and then forks one more for each connection.  The kernel ends a forked process that computes
for too long; its connection then reads as ended, and no other process is affected.

The processes import this module, so that it imports no torch.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import resource
import signal
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from multiprocessing.process import BaseProcess
from typing import Any

TIME_LIMIT_S = 2.0
_MEMORY_LIMIT_BYTES = 256 << 20
LENGTH = struct.Struct("<I")  # before each message: its number of bytes
_START_AT_ONCE = 4  # forked processes that may have `one_of_few` at the same time
_NICENESS = 5  # engine and front end come first
_PATIENCE_S = 60.0  # with a process that is stopped, or has no processor
_CONTROL_LIMIT_S = 1.0  # for a first process to take a connection, once many wait for it


class ProcessFailed(Exception):
    """A process has ended without an answer, or does not answer; the message is the reason."""


Main = Callable[[socket.socket], None]  # of a process that forks others
Start = Callable[[Main, socket.socket], Any]  # returns the process, which has kill()
# What a forked process does with its connection.
Work = Callable[[socket.socket, "Limits"], None]


def spawn(main: Main, control: socket.socket) -> BaseProcess:
    """Start a process that runs ``main(control)``.  It also imports the main module of this one."""
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=main, args=(control,), daemon=True)
    process.start()
    return process


class LimitedProcesses:
    """Starts processes that run ``main``, which calls `fork_for_each_connection`.

    ``setup``: bytes for the first process.  It starts with the first connection, and again if it
    has ended or takes no connections.  ``start``: starts it.
    """

    def __init__(self, main: Main, setup: bytes, start: Start = spawn) -> None:
        self._main = main
        self._setup = setup
        self._start = start
        self._control: socket.socket | None = None
        self._process: Any = None
        self._lock = threading.RLock()  # threads open connections

    def open(self) -> socket.socket:
        """Return the connection to a new process; the process ends when it is closed."""
        mine, other = socket.socketpair()
        mine.settimeout(_PATIENCE_S)
        with other, self._lock:
            try:
                socket.send_fds(self.start(), [b"c"], [other.fileno()])
            except OSError:  # the first process has ended, or is stopped
                self.close()
                socket.send_fds(self.start(), [b"c"], [other.fileno()])
        return mine

    def ask(self, data: bytes, time_limit_s: float) -> bytes:
        """Return the answer of a new process to one message.  Raises ProcessFailed."""
        with self.failures(time_limit_s), self.open() as connection:
            send(connection, data)
            return receive(connection)

    @contextmanager
    def failures(self, time_limit_s: float = TIME_LIMIT_S) -> Iterator[None]:
        """Raise ProcessFailed for the error of a connection to a process with this limit."""
        try:
            yield
        except TimeoutError:
            self.close()
            reason = f"its process has not answered for {_PATIENCE_S:g} s"
            raise ProcessFailed(reason) from None
        except (EOFError, OSError):
            raise ProcessFailed(exceeded(time_limit_s)) from None

    def start(self) -> socket.socket:
        """Start the first process if it does not run, without a wait; return its connection."""
        with self._lock:
            if self._control is None:
                self._control, other = socket.socketpair()
                with other:
                    self._process = self._start(self._main, other)
                send(self._control, self._setup)
                self._control.settimeout(_CONTROL_LIMIT_S)
            return self._control

    def close(self) -> None:
        """End the first process; forked ones end with their connections.

        The next connection starts another: close these also if a process does not answer.
        """
        with self._lock:
            if self._control is not None:
                self._control.close()
                self._process.kill()  # a stopped one does not notice the end of the connection
                self._control = None


def send(connection: socket.socket, data: bytes) -> None:
    """Send a message."""
    connection.sendall(LENGTH.pack(len(data)) + data)


def receive(connection: socket.socket) -> bytes:
    """Return the next message.  Raises EOFError at the end of the connection."""
    return _read(connection, LENGTH.unpack(_read(connection, LENGTH.size))[0])


def exceeded(time_limit_s: float = TIME_LIMIT_S) -> str:
    """Return why a process has ended without an answer."""
    return f"it takes more than {time_limit_s:g} s, or too much memory"


def fork_for_each_connection(
    control: socket.socket,
    prepare: Callable[[bytes], Work],
    time_limit_s: float = TIME_LIMIT_S,
    memory_limit_bytes: int = _MEMORY_LIMIT_BYTES,
) -> None:
    """Fork a process that works for each connection, until the parent closes ``control``.

    ``prepare`` gets the setup and imports all modules; it has no limits and sees no untrusted work.
    ``time_limit_s``: of the processor, for one piece of work.  ``memory_limit_bytes``: of a forked
    process, above what it has when it starts.
    This function returns in each forked process too, when its work is done.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for forked processes
    records = os.memfd_create("limits")
    with suppress(EOFError, ConnectionResetError, BrokenPipeError):
        work = prepare(receive(control))
        for number in count():
            data, descriptors, _, _ = socket.recv_fds(control, 1, 1)
            if not data:
                return
            with socket.socket(fileno=descriptors[0]) as connection:
                if os.fork() == 0:
                    control.close()
                    os.nice(_NICENESS)
                    _limit_memory(memory_limit_bytes)
                    work(connection, Limits(time_limit_s, records, number % _START_AT_ONCE))
                    return


@dataclass(frozen=True)
class Limits:
    """Limits that a forked process sets for parts of its work.

    ``time_limit_s``: of `time`.  ``place``: the byte of the file ``records`` that it locks.
    """

    time_limit_s: float
    records: int
    place: int

    @contextmanager
    def time(self) -> Iterator[None]:
        """End this process if the block computes for more than the limit."""
        # The default action of SIGPROF ends the process, also in code that runs for long in C.
        signal.setitimer(signal.ITIMER_PROF, self.time_limit_s)
        yield
        signal.setitimer(signal.ITIMER_PROF, 0)

    @contextmanager
    def one_of_few(self) -> Iterator[None]:
        """Wait until few processes of this parent are in such a block: each may need much."""
        # The lock belongs to this process, and ends with it.
        fcntl.lockf(self.records, fcntl.LOCK_EX, 1, self.place)
        yield
        fcntl.lockf(self.records, fcntl.LOCK_UN, 1, self.place)


def _limit_memory(num_bytes: int) -> None:
    with open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    limit = used + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _read(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        found = connection.recv(min(size - len(data), 1 << 20))
        if not found:
            raise EOFError
        data += found
    return bytes(data)
