"""A server one of whose processes is killed: its clients get an error soon, and it ends."""

from __future__ import annotations

import http.client
import json
import os
import signal
from pathlib import Path

import pytest

from tests.support import forked, selection
from tests.support.runs import TINY, run_gpt
from tests.support.server_process import ROOT, TIMEOUT_S, Server, started

TOOL = str(ROOT / "tools" / "run_text_generation_server.py")
DEADLINE_S = 5  # for the error, after the kill
# More seconds of steps than the deadline has: the text cannot end before.
ENDLESS = {"prompt": "1 2 3", "max_tokens": 60, "ignore_eos": True}
SLOW_STEPS = "inference.step:slow:0.2s"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a GPT with experts, and 64 positions."""
    folder = tmp_path_factory.mktemp("checkpoint")
    flags = "--max-position-embeddings 64 --save-interval 6 --num-experts 4 --moe-router-topk 2"
    run_gpt(folder / "run", *flags.split(), "--save", str(folder / "ck"), base=TINY)
    return folder / "ck"


def ask(server: Server, *, is_stream: bool) -> http.client.HTTPConnection:
    """Send a request whose answer must be read in `DEADLINE_S` seconds after the last data."""
    connection = http.client.HTTPConnection(*server.address, timeout=TIMEOUT_S)
    headers = {"Content-Type": "application/json"}
    body = json.dumps({**ENDLESS, "stream": is_stream})
    connection.request("POST", "/v1/completions", body, headers)
    return connection


def process_of(server: Server, victim: str) -> int:
    """Return the process of a rank, or of the front end, which rank 0 has started."""
    commands = children_of(forked.program_of(server.process.pid))
    ranks = {environment_of(p).get("RANK", ""): forked.program_of(p) for p in commands}
    if victim == "front end":
        (found,) = children_of(ranks["0"])
        return found
    return ranks[victim]


def children_of(process: int) -> list[int]:
    tasks = Path(f"/proc/{process}/task").glob("*/children")
    return [int(word) for file in tasks for word in file.read_text().split()]


def environment_of(process: int) -> dict[str, str]:
    words = Path(f"/proc/{process}/environ").read_text().split("\0")
    return dict(word.split("=", 1) for word in words if "=" in word)


@pytest.mark.feature("Serving: a killed rank ends open requests within 5 s and is named")
@pytest.mark.parametrize(
    ("axis", "victim", "message"),
    selection.first(
        2,
        [
            ("tensor", "0", "the engine's process has ended"),
            ("pipeline", "1", "the engine failed: rank 1 failed: its process "),
            ("expert", "1", "the engine failed: rank 1 failed: its process "),
        ],
    ),
)
def test_a_killed_rank_fails_open_requests_in_time(
    axis: str, victim: str, message: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(checkpoint, axis, monkeypatch) as server:
        plain = ask(server, is_stream=False)
        stream = ask(server, is_stream=True)
        events = stream.getresponse()
        assert events.readline().startswith(b"data: ")
        assert plain.sock is not None
        plain.sock.settimeout(DEADLINE_S)
        os.kill(process_of(server, victim), signal.SIGKILL)
        answer = plain.getresponse()
        error = json.loads(answer.read())["error"]
        assert (answer.status, error["type"]) == (500, "server_error")
        assert error["message"].startswith(message)
        last = events.read().decode().split("data: ")[-2]  # before [DONE]
        assert json.loads(last)["error"] == error
        assert server.process.wait(TIMEOUT_S) != 0


def test_a_killed_front_end_ends_all_ranks(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(checkpoint, "tensor", monkeypatch) as server:
        stream = ask(server, is_stream=True)
        events = stream.getresponse()
        assert events.readline().startswith(b"data: ")
        os.kill(process_of(server, "front end"), signal.SIGKILL)
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            events.read()
        assert server.process.wait(TIMEOUT_S) != 0
        assert server.process.stdout is not None
        said = server.process.stdout.read()
        assert "rank 0 failed: LaunchError: the HTTP front end has been killed by SIGKILL" in said


def serving(checkpoint: Path, axis: str, monkeypatch: pytest.MonkeyPatch):
    """Start a server of two ranks whose steps are slow."""
    monkeypatch.setenv("FAULTS", SLOW_STEPS)
    command = [*forked.torchrun(2), TOOL]
    command += ["--load", str(checkpoint), "--device", "cpu", "--port", "0"]
    sizes = {"tensor": 1, axis: 2}
    for name, size in sizes.items():
        command += [f"--{name}-model-parallel-size", str(size)]
    return started(command)
