"""The line that follows a long job: on a terminal of rank 0 alone, and gone afterwards."""

from __future__ import annotations

import io
import os
import pty

import pytest

from megatron.core import progress
from megatron.core.progress import CLEAR, Progress


def test_the_line_has_count_share_rate_and_time_left() -> None:
    following = Progress("encoding", 2000, "rows")
    assert following.line(1.0) == "encoding: 0/2,000 rows, 0%"
    following.add(500)
    assert following.line(10.0) == "encoding: 500/2,000 rows, 25%, 50.0 rows/s, 0:00:30 left"
    sizes = Progress("writing /x", 2.5, "GB")
    sizes.add(0.25)
    assert sizes.line(1.0) == "writing /x: 0.2/2.5 GB, 10%, 0.2 GB/s, 0:00:09 left"
    assert Progress("blending 2 datasets").line(61.0) == "blending 2 datasets, 0:01:01"


def _drawn(monkeypatch: pytest.MonkeyPatch, stream: io.TextIOBase, rank: str) -> None:
    """Follow a job that ends when its thread has drawn twice, or had no thread."""
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(progress, "_QUIET_S", 0.0)
    monkeypatch.setattr(progress, "_EVERY_S", 0.001)
    with Progress("encoding", 2, "rows") as following:
        following.add()
        enough = following.num_drawn + 2  # the first may have been drawn before
        while following._thread is not None and following.num_drawn < enough:
            following._has_ended.wait(0.001)


@pytest.mark.parametrize(
    ("rank", "kind", "is_drawn"),
    [("0", "xterm", True), ("1", "xterm", False), ("0", "dumb", False)],
)
def test_a_terminal_of_rank_0_shows_it_and_is_clear_afterwards(
    rank: str, kind: str, is_drawn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", kind)
    main, terminal = pty.openpty()
    with os.fdopen(terminal, "w") as stream, os.fdopen(main, "rb", buffering=0) as screen:
        _drawn(monkeypatch, stream, rank)
        stream.write("end")
        stream.flush()
        seen = ""
        while not seen.endswith("end"):
            seen += screen.read(65536).decode()
    assert ("encoding: 1/2 rows, 50%" in seen) is is_drawn
    assert seen.endswith(f"{CLEAR}\r{CLEAR}end" if is_drawn else "end")


def test_a_file_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    _drawn(monkeypatch, stream, "0")
    assert stream.getvalue() == ""
