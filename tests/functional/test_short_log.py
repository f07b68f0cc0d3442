"""--log-style short: a screen about the run, short lines, and a live line on a terminal."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

from tests.repo.source import ROOT
from tests.support.ranks import run_ranks
from tests.support.runs import TINY, train_gpt

LAUNCHER = {"TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE"}


def said_by(rank: int, world_size: int, argv: list[str]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        train_gpt(rank, world_size, argv)
    return said.getvalue()


def test_a_short_log_fits_on_a_screen(tmp_path: Path) -> None:
    save = str(tmp_path / "ckpt")
    flags = f"--log-style short --train-iters 4 --log-interval 2 --eval-interval 2 --save {save}"
    (said,) = run_ranks(said_by, 1, [*TINY, *flags.split(), "--eval-iters", "1"])
    lines = said.splitlines()
    assert len(lines) < 30
    assert lines[0].startswith("model    gpt, ")
    given = " ".join(said[said.index("\nflags ") : said.index("all arguments")].split())
    assert flags.removesuffix(save).split()[0] in given
    assert "--log-interval 2" in given
    assert "--start-weight-decay" not in given, "it is derived"
    steps = [line for line in lines if line.startswith("step ")]
    assert [line.split(" | ")[0] for line in steps] == ["step 2/4", "step 4/4"]
    assert all(re.search(r"lm loss \d+\.\d{4} .*grad norm \S+ \| lr \S+", line) for line in steps)
    assert re.search(r"^validation at step 2 \| lm loss \S+ \| lm loss PPL", said, re.MULTILINE)
    arguments = (tmp_path / "ckpt" / "arguments.txt").read_text()
    assert "  log_interval .................................... 2\n" in arguments
    assert len(arguments.splitlines()) > 500


def test_the_log_of_two_ranks_is_that_of_megatron() -> None:
    said = "".join(run_ranks(said_by, 2, [*TINY, "--train-iters", "1", "--log-interval", "1"]))
    assert "--- arguments ---" in said
    assert re.search(r"iteration +1/ +1 \|", said)
    assert "\x1b" not in said


def test_a_terminal_has_a_line_that_follows_each_step(tmp_path: Path) -> None:
    main, terminal = pty.openpty()
    flags = "--train-iters 3 --log-interval 2 --print-args".split()
    command = [sys.executable, "pretrain_gpt.py", *TINY, *flags]
    env = {name: value for name, value in os.environ.items() if name not in LAUNCHER}
    with subprocess.Popen(command, cwd=ROOT, stdout=terminal, stderr=terminal, env=env) as run:
        os.close(terminal)
        said = b""
        with contextlib.suppress(OSError):  # the end of a terminal
            while part := os.read(main, 65536):
                said += part
    os.close(main)
    assert run.returncode == 0, said.decode()[-2000:]
    assert re.search(
        rb"step 3/3 \| lm loss \S+ \| [\d,]+ tokens/s \| 0:\d\d:\d\d left\x1b\[K\r", said
    )
    assert b"--- arguments ---" in said
