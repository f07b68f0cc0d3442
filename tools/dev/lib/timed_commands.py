"""Run commands under time limits and make a table of their results.

The output of a command goes to a file, not to a pipe: a process that outlives the command cannot
keep this one waiting.  A command that exceeds its limit gets SIGABRT first, upon which Python
prints the stack of each thread (PYTHONFAULTHANDLER), and then SIGKILL, with all its descendants.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[3]
_ABORT_S = 2.0  # for the stacks of threads
_OUTPUT_LINES = 400  # of a failed command, in the log
_FAILURES = (ArithmeticError, LookupError, OSError, RuntimeError, TypeError, ValueError)
_ERROR = re.compile(r"^(?:\[[^\]]*\]: ?|E +)?[\w.]*(?:Error|Exception|Missing\w+)\b.*")


@dataclass(frozen=True)
class Command:
    """One row of a stage: a command line, its time limit, and a function that judges its output."""

    name: str
    words: Sequence[str]
    limit_s: float
    judge: Callable[[str], str] = lambda output: "ok"  # a result that starts with "ok", or why not
    has_tables: bool = False  # the Markdown tables of its output belong to its row


@dataclass(frozen=True)
class Row:
    """The result of a command."""

    name: str
    result: str
    elapsed_s: float
    tables: str = ""


def run_stage(
    commands: Sequence[Command], log: Path, stage_s: float, workers: int = 1
) -> list[Row]:
    """Run the commands, ``workers`` at a time; return a row for each.

    Each row is printed when its command has ended, and the output is written to ``log``.
    """
    ends_s = time.monotonic() + stage_s
    lock = threading.Lock()
    with log.open("w") as file, ThreadPoolExecutor(workers) as pool:

        def run(command: Command) -> Row:
            left_s = ends_s - time.monotonic() - _ABORT_S
            if left_s < 1:
                return Row(command.name, "skipped: no time is left", 0.0)
            row, output = _run(command, min(command.limit_s, left_s))
            with lock:
                file.write(f"$ {shlex.join(command.words)}\n{output}\n-> {row.result}\n\n")
                file.flush()
                print(f"{row.name}: {row.result} ({row.elapsed_s:.0f} s)", flush=True)
            return row

        return list(pool.map(run, commands))


def table_of(rows: Sequence[Row]) -> list[str]:
    """Return the rows as a Markdown table, after the tables of their commands."""
    head = ["| command | result | seconds |", "|---|---|---|"]
    table = [f"| {r.name} | {_cell(r.result)} | {r.elapsed_s:.1f} |" for r in rows]
    return [*(r.tables for r in rows if r.tables), *head, *table]


def _cell(text: str) -> str:
    return text.replace("|", "/")


def run_to_file(words: Sequence[str], file: IO[str], limit_s: float, **more: Any) -> int | None:
    """Run a command with its output in a file; return its exit code, or None after ``limit_s``.

    Processes that it leaves are ended: they would keep a GPU's memory.
    """
    process = subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=file,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        **more,
    )
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        _end(process.pid)
        process.wait()
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _run(command: Command, limit_s: float) -> tuple[Row, str]:
    """Run a command; return its row and what the log shows of its output."""
    began_s = time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as file:
        code = run_to_file(command.words, file, limit_s, cwd=ROOT)
        file.seek(0)
        output = file.read()
    result = _result(command, output, code, limit_s)
    lines = output.splitlines()
    shown = lines if result.startswith("ok") else lines[-_OUTPUT_LINES:]
    tables = _tables_in(lines) if command.has_tables else ""
    return Row(command.name, result, time.monotonic() - began_s, tables), "\n".join(shown)


def _tables_in(lines: Sequence[str]) -> str:
    """Return the Markdown tables of an output, each below its title, and an empty line."""
    found: list[str] = []
    title = ""
    for line in lines:
        if line.startswith("|"):
            if title:
                found += [*([""] if found else []), title, ""]
            found.append(line)
            title = ""
        elif line:
            title = line
    return "\n".join([*found, ""]) if found else ""


def _result(command: Command, output: str, code: int | None, limit_s: float) -> str:
    """Return the judgement of the output, or why the command failed; ``code`` None: no time."""
    if code == 0:
        return _judged(command, output)
    if code is None:
        judged = _judged(command, output)  # what had been found is not lost
        found = f"; before: {judged[4:]}" if judged.startswith("ok: ") else ""
        return f"failed: not finished in {limit_s:.0f} s{found}"
    errors = [line for line in output.splitlines() if _ERROR.match(line)]
    return f"failed with exit code {code}" + (f": {errors[-1][:160]}" if errors else "")


def _judged(command: Command, output: str) -> str:
    """Return the judgement of the output; a judge that fails costs its row, not the stage."""
    try:
        return command.judge(output)
    except _FAILURES as error:
        return f"failed: its output cannot be judged ({type(error).__name__}: {error})"


def _end(pid: int) -> None:
    """Abort and kill a process and its descendants: ranks of torchrun have their own sessions."""
    processes = _descendants(pid)
    for number in (signal.SIGABRT, signal.SIGKILL):
        for one in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(one, number)
        if number == signal.SIGABRT:
            time.sleep(_ABORT_S)


def _descendants(pid: int) -> list[int]:
    """Return ``pid`` and the processes below it."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found
