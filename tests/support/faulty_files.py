"""A disk that fails: what this process does to files goes wrong at the operation that is asked for.

Operations are counted: opening for writing, each write to the system, fsync, mkdir, rename, link.
"""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

_open = open


class FaultyFiles:
    """From operation ``fails_at`` on, or only there if ``once``, those of ``kinds`` raise ``code``.

    A write that fails has written half of its data.  ``short``: every write takes only a part,
    which is no failure.
    """

    def __init__(
        self,
        fails_at: int | None = None,
        code: int = errno.EIO,
        *,
        once: bool = True,
        short: bool = False,
    ) -> None:
        self.fails_at, self.code, self.once, self.short = fails_at, code, once, short
        self.done: list[str] = []  # kinds of the operations so far

    def fails(self, kind: str) -> bool:
        """Count an operation; whether it is to fail."""
        self.done.append(kind)
        if self.fails_at is None or len(self.done) <= self.fails_at:
            return False
        return len(self.done) == self.fails_at + 1 or not self.once

    def error(self, path: Any = None) -> OSError:
        return OSError(self.code, os.strerror(self.code), *([str(path)] if path else []))

    def open(self, file: Any, mode: str = "r", buffering: int = -1, *text: Any, **more: Any) -> Any:
        """As `open`; the kernel names the path where opening fails, and not where writing does."""
        if not set(mode) & set("wax+"):
            return _open(file, mode, buffering, *text, **more)
        if self.fails("open"):
            raise self.error(file)
        raw = _Raw(self, file, mode.replace("b", "").replace("t", ""))
        buffered = io.BufferedWriter(raw, buffering if buffering > 1 else io.DEFAULT_BUFFER_SIZE)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, *text, **more)

    @contextmanager
    def installed(self) -> Iterator[FaultyFiles]:
        """What the code under test does goes through here."""
        with ExitStack() as stack:
            stack.enter_context(mock.patch("builtins.open", self.open))
            stack.enter_context(mock.patch("io.open", self.open))
            for name in ("fsync", "mkdir", "rename", "link"):
                stack.enter_context(mock.patch.object(os, name, self._faulty(name)))
            yield self

    def _faulty(self, name: str) -> Any:
        real = getattr(os, name)

        def call(*args: Any, **options: Any) -> Any:
            if self.fails(name):
                raise self.error(None if name == "fsync" else args[0])
            return real(*args, **options)

        return call


class _Raw(io.FileIO):
    def __init__(self, disk: FaultyFiles, file: Any, mode: str) -> None:
        self._disk = disk
        super().__init__(file, mode)

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if self._disk.fails("write"):
            super().write(view[: len(view) // 2])
            raise self._disk.error()
        return super().write(view[: max(1, len(view) // 2)] if self._disk.short else view)
