"""Run a command line with several values of its flags, and tabulate the losses.

    tools/sweep.py sweep.yaml                # one run after another
    tools/sweep.py sweep.yaml --jobs 4 --gpus-per-run 2
    tools/sweep.py sweep.yaml --print        # one command per run, for a scheduler
    tools/sweep.py sweep.yaml --table        # the table of the runs so far

The file has ``command``; ``folder`` of the runs; ``grid``, flag -> list of values, of which all
combinations are run, or ``runs``, a list of flag -> value, or both; and ``metric``, the value
that is compared (default: the validation loss).  A value true adds the flag alone, false leaves it
out, a list gives several words.

A run has a folder with log.txt, metrics.jsonl and status.json.  Runs that are complete are not
started again; with --save-interval in the command the others resume from their checkpoint.
docs/tracking.md has an example.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # installed or not

from megatron.core.config.errors import ConfigError, MissingDependency
from megatron.core.optional import require
from tools.lib.run_values import METRICS_FILE, NoValues, read_run

KEYS = {"command", "folder", "grid", "runs", "metric"}
METRICS = ("lm loss validation", "lm loss")  # the first that a run has
_ERROR = re.compile(r"\b\w*(?:Error|Exception)\b|\berror:|^  - ")
_LONGEST = 120  # of the name of a folder


@dataclass(frozen=True)
class Run:
    """A run of the sweep: its folder and complete command."""

    folder: Path
    command: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.folder.name

    def status(self) -> dict[str, Any]:
        """Return ``code`` of the last try, None before its end, and ``seconds`` of all tries."""
        try:
            found: dict[str, Any] = json.loads((self.folder / "status.json").read_text())
        except FileNotFoundError:
            return {"code": None, "seconds": 0.0}
        return found

    def start(self, gpus: Sequence[int] = ()) -> int:
        """Run the command, on ``gpus`` only if there are any; return its exit status."""
        self.folder.mkdir(parents=True, exist_ok=True)
        seconds = self.status()["seconds"]
        began_s = time.monotonic()
        environ = {**os.environ}
        if gpus:
            environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
        self._note(None, seconds)
        with (self.folder / "log.txt").open("a") as log:
            try:
                code = subprocess.run(
                    self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environ
                ).returncode
            except OSError as error:
                code = 127  # of a shell for a program that it cannot start
                print(f"error: {self.command[0]}: {error.strerror}", file=log)
        self._note(code, seconds + time.monotonic() - began_s)
        return code

    def _note(self, code: int | None, seconds: float) -> None:
        text = json.dumps({"code": code, "seconds": round(seconds, 1)})
        (self.folder / "status.json").write_text(text + "\n")

    def error(self) -> str:
        """Return the line of the log that names the last error."""
        lines = (self.folder / "log.txt").read_text(errors="replace").splitlines()
        found = [line for line in lines if _ERROR.search(line)] or lines or ["it printed nothing"]
        return found[-1].strip()[:200]


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is unfinished and print the table; return 1 if a run failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sweep", type=Path, metavar="sweep.yaml", help="the file described above")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (default: 1)")
    parser.add_argument("--gpus-per-run", type=int, default=0, help="GPUs that each run sees")
    parser.add_argument("--only", metavar="NAME", help="start this run alone")
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--print", action="store_true", help="print the command of each unfinished run"
    )
    form.add_argument("--table", action="store_true", help="start nothing, print the table")
    options = parser.parse_args(argv)
    if options.jobs < 1 or options.gpus_per_run < 0:
        parser.error("--jobs must be 1 or more, --gpus-per-run 0 or more")
    try:
        runs, metrics = read_sweep(options.sweep)
    except (ConfigError, MissingDependency) as error:
        parser.error(str(error))
    wanted = [run for run in runs if options.only in (None, run.name)]
    if not wanted:
        parser.error(f"--only {options.only}: {options.sweep} has no such run")
    unfinished = [run for run in wanted if run.status()["code"] != 0]
    if options.print:
        for run in unfinished:
            program = [sys.executable, str(Path(__file__).resolve()), str(options.sweep)]
            print(shlex.join([*program, "--only", run.name]))
        return 0
    if not options.table:
        start_all(unfinished, options.jobs, options.gpus_per_run)
    print("\n".join(table(wanted, metrics)))
    return int(any(run.status()["code"] not in (None, 0) for run in wanted))


def read_sweep(path: Path) -> tuple[list[Run], Sequence[str]]:
    """Return the runs, and the tags of which the first is compared.  Raise ConfigError."""
    yaml = require("yaml", str(path))
    try:
        sweep = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    keys = sweep.keys() if isinstance(sweep, dict) else set()
    if not {"command", "folder"} <= keys <= KEYS:
        raise ConfigError(
            f"{path} must have command and folder, and may have grid, runs and metric; it has "
            f"{', '.join(map(str, keys)) or repr(sweep)}"
        )
    try:
        words = shlex.split(str(sweep["command"] or ""))
    except ValueError as error:
        raise ConfigError(f"{path}: command cannot be split into words: {error}") from None
    if not words:
        raise ConfigError(f"{path}: command is empty")
    words[0] = sys.executable if words[0] == "python" else words[0]
    runs = [run_of(Path(str(sweep["folder"])), words, flags) for flags in combinations(path, sweep)]
    if len({run.name for run in runs}) < len(runs):
        raise ConfigError(f"{path} has the same run twice: remove one of them")
    return runs, [sweep["metric"]] if "metric" in sweep else METRICS


def combinations(path: Path, sweep: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the flags of each run: each of ``runs`` with each combination of ``grid``."""
    grid = sweep.get("grid") or {}
    runs = sweep.get("runs") or [{}]
    if not isinstance(grid, dict) or not isinstance(runs, list):
        raise ConfigError(f"{path}: grid must have flags with lists of values, runs be a list")
    for flag, values in grid.items():
        if not isinstance(values, list):
            raise ConfigError(f"{path}: {flag} of grid has {values!r} in place of a list of values")
    for flags in runs:
        if not isinstance(flags, dict):
            raise ConfigError(f"{path}: runs has {flags!r} in place of flags with values")
        for values in itertools.product(*grid.values()):
            yield {**flags, **dict(zip(grid, values, strict=True))}


def run_of(folder: Path, words: Sequence[str], flags: Mapping[str, Any]) -> Run:
    """Return the run with ``flags`` added to the command."""
    name = ",".join(f"{flag}={' '.join(_words(value))}" for flag, value in flags.items()) or "base"
    name = re.sub(r"[^\w.,=+-]", "_", name)[:_LONGEST]
    home = folder / name
    command = [*words]
    for flag, value in flags.items():
        if value is not False and value is not None:
            command.append("--" + flag.removeprefix("--").replace("_", "-"))
            command += [] if value is True else _words(value)
    if "--metrics-file" not in command:
        command += ["--metrics-file", str(home / METRICS_FILE)]
    if "--save-interval" in command and "--save" not in command:
        saves = str(home / "checkpoints")
        command += ["--save", saves, "--load", saves]
    return Run(home, tuple(command))


def _words(value: Any) -> list[str]:
    return [*map(str, value)] if isinstance(value, list) else [str(value)]


def start_all(runs: Sequence[Run], jobs: int, gpus_per_run: int) -> None:
    """Start the runs, ``jobs`` at a time, and print how each ended."""
    slots: SimpleQueue[int] = SimpleQueue()
    for slot in range(jobs):
        slots.put(slot)

    def start(run: Run) -> None:
        slot = slots.get()
        try:
            code = run.start(range(slot * gpus_per_run, (slot + 1) * gpus_per_run))
        finally:
            slots.put(slot)
        print(f"{run.name}: " + ("done" if code == 0 else f"failed: {run.error()}"), flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(start, runs))


def table(runs: Sequence[Run], metrics: Sequence[str]) -> list[str]:
    """Return the lines of the table: the best run first, then what failed or has not run."""
    rows = []
    for run in runs:
        status = run.status()
        try:
            curves = read_run(run.folder)
        except NoValues:
            curves = {}
        tag = next((tag for tag in metrics if curves.get(tag)), "")
        value = curves[tag][max(curves[tag])] if tag else float("inf")
        step = max((max(curve) for curve in curves.values()), default=0)
        state = {0: "done", None: "started" if curves else "not started"}.get(status["code"])
        text = (run.name, f"{value:.4f}" if tag else "", tag, str(step), _time(status["seconds"]))
        rows.append((status["code"] != 0, value != value, value, (*text, state or run.error())))
    head = ("run", "value", "of", "steps", "time", "state")
    lines = [head, *(text for *_, text in sorted(rows))]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head) - 1)]
    return [
        "  ".join([*(c.ljust(w) for c, w in zip(line, widths, strict=False)), line[-1]])
        for line in lines
    ]


def _time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


if __name__ == "__main__":
    sys.exit(main())
