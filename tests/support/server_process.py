"""Start a server with the fake engine, and talk to it."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.tokenizer_files import write_bpe

ROOT = Path(__file__).resolve().parents[2]
VOCAB_SIZE = 600
EOD = 0
TIMEOUT_S = 60


class _OpenAI:
    """The openai package, imported by the first test that uses it, which skips without it.

    To import it takes 1.6 s of CPU time, and each worker of xdist imports all tests.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest asks whether it is a wrapped fixture
            raise AttributeError(name)
        return getattr(pytest.importorskip("openai"), name)


openai = _OpenAI()


@dataclass
class Server:
    """A running server."""

    process: subprocess.Popen[str]
    url: str = ""
    lines: list[str] = field(default_factory=list)

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").rsplit(":", 1)
        return host, int(port)

    def read_until(self, pattern: str) -> str:
        """Read lines of the output until one matches; return its first group."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if found := re.search(pattern, line):
                return found[1]
        raise AssertionError(f"no {pattern!r} in the output:\n" + "".join(self.lines))

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(*self.address, timeout=TIMEOUT_S)

    def ask(
        self, method: str, path: str, body: object = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        """Return status and JSON value of an answer; ``body`` may be bytes."""
        status, _, content = self.ask_raw(method, path, body, headers)
        return status, json.loads(content)

    def ask_raw(
        self, method: str, path: str, body: object = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        connection = self.connect()
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        kind = {"Content-Type": "application/json"} if data is not None else {}
        connection.request(method, path, data, {**kind, **(headers or {})})
        answer = connection.getresponse()
        found = answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()
        connection.close()
        return found

    def metric(self, name: str) -> float:
        """Return the value of a line of /metrics."""
        text = self.ask_raw("GET", "/metrics")[2].decode()
        found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
        assert found, f"no {name} in\n{text}"
        return float(found[1])

    def end(self) -> int:
        """Send SIGTERM and return the exit status."""
        self.process.send_signal(signal.SIGTERM)
        self.lines += (self.process.communicate(timeout=TIMEOUT_S)[0] or "").splitlines(True)
        return self.process.returncode


@contextmanager
def fake_server(folder: Path, *words: str, tokenizer: Path | None = None) -> Iterator[Server]:
    """Yield a server with the fake engine; kill it at the end."""
    if tokenizer is None:
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer = write_bpe(folder, VOCAB_SIZE)
    command = [
        sys.executable,
        str(ROOT / "tests" / "support" / "fake_engine.py"),
        *("--port", "0", "--tokenizer", str(tokenizer)),
        *("--vocab-size", str(VOCAB_SIZE), "--eod", str(EOD), *words),
    ]
    with started(command) as server:
        yield server


@contextmanager
def started(command: list[str]) -> Iterator[Server]:
    """Yield the server that ``command`` starts, once it serves; kill it at the end.

    Skips the test if a package of the server is missing.
    """
    for package in ("starlette", "uvicorn"):
        pytest.importorskip(package)
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    server = Server(process)
    try:
        server.url = server.read_until(r"serving .* on (http://\S+)")
        yield server
    finally:
        process.kill()  # its front end ends at the end of the socket
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
