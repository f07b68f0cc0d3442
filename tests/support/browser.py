"""Headless Chromium, driven over its debugging pipe."""

from __future__ import annotations

import itertools
import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync "
    "--disable-background-networking --disable-component-update --disable-dev-shm-usage "
    "--remote-debugging-pipe"
)
CHROMIUM = shutil.which("chromium")
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="chromium is not installed: apt-get install chromium"
)


class Page:
    """A page, by JSON messages that end with a zero byte."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self._in = os.fdopen(read_fd, "rb")
        self._out = os.fdopen(write_fd, "wb")
        self._numbers = itertools.count(1)
        self._rest = b""
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []

    def open(self, url: str) -> None:
        """Open ``url`` and note what its console prints."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        found = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = found["sessionId"]
        for domain in ("Runtime", "Log", "Network", "Page"):
            self.call(f"{domain}.enable")
        self.call("Page.navigate", url=url)
        while not any(e["method"] == "Page.loadEventFired" for e in self.events):
            self._note(self._receive())

    def run(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, or of its promise."""
        found = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def call(self, method: str, **params: object) -> dict[str, Any]:
        """Call a method of the debugging protocol."""
        number = next(self._numbers)
        message: dict[str, object] = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        self._out.write(json.dumps(message).encode() + b"\0")
        self._out.flush()
        while (found := self._receive()).get("id") != number:
            self._note(found)
        assert "error" not in found, found
        result: dict[str, Any] = found["result"]
        return result

    def _note(self, message: dict[str, Any]) -> None:
        if "method" in message:
            self.events.append(message)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = self._in.read1(1 << 16)
            assert part, "chromium has ended"
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(line)
        return found


@contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """Yield a page of a new browser whose profile is in ``folder``."""
    assert CHROMIUM is not None, "the test needs_chromium"
    to_read, its_write = os.pipe()
    its_read, to_write = os.pipe()
    words = shlex.join([CHROMIUM, *FLAGS.split(), f"--user-data-dir={folder}", "about:blank"])
    process = subprocess.Popen(
        ["bash", "-c", f"exec {words} 3<&{its_read} 4>&{its_write}"],
        pass_fds=(its_read, its_write),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(its_read)
    os.close(its_write)
    try:
        yield Page(to_read, to_write)
    finally:
        process.kill()
        process.wait()
