"""Runs under tools/launch.py on simulated nodes, which are processes of this host."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support import forked
from tests.support.runs import ROOT, TINY, without_times

QUICK = (
    "--restart-backoff 0.1 --peer-timeout 6 --node-timeout 8 --shutdown-timeout 20 "
    "--rdzv-conf join_timeout=60"
).split()
MODEL = (
    "--global-batch-size 4 --seq-length 16 --eval-iters 0 --save-interval 2 --hidden-dropout 0.1 "
    "--exit-signal-handler"
).split()


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


@dataclass
class SupervisedRun:
    """A run of ``nodes`` supervisors with ``ranks`` ranks each, which save into ``folder``.

    ``forks``: start supervisors and ranks with `tests.support.forked`.  Then ranks outlive a killed
    supervisor, and do not receive SIGSTOP.
    """

    folder: Path
    nodes: int = 1
    nnodes: str = ""  # in place of the number of nodes
    ranks: int = 2
    steps: int = 8
    launcher: Sequence[str] = ()  # further flags of tools/launch.py
    flags: Sequence[str] = ()  # further flags of the script
    environ: dict[str, str] = field(default_factory=dict)
    script: Sequence[str] = ("pretrain_gpt.py",)
    forks: bool = False

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.port = free_port()
        self.run_id = f"test{os.getpid()}x{self.port}"

    def start(self, node: int, *more: str, faults: str | None = None) -> subprocess.Popen[bytes]:
        """Start, or start again, the supervisor of ``node``.

        ``more``: flags of its launcher; ``faults``: value of FAULTS on this node.
        """
        launcher = [*QUICK, "--nproc-per-node", str(self.ranks), *self.launcher]
        launcher += ["--exit-report-dir", str(self.folder / "reports")]
        if self.nodes > 1:
            launcher += ["--nnodes", self.nnodes or str(self.nodes), "--rdzv-backend", "c10d"]
            launcher += ["--rdzv-endpoint", f"127.0.0.1:{self.port}", "--rdzv-id", self.run_id]
            launcher += ["--node-name", f"node{node}", "--local-addr", "127.0.0.1"]
        launcher += more
        python = forked.python() if self.forks else sys.executable
        own = {"PYTHON_EXEC": python}  # of the ranks
        own |= {} if faults is None else {"FAULTS": faults}
        saved = str(self.folder / "checkpoints")
        flags = [*TINY, *MODEL, "--train-iters", str(self.steps), "--save", saved, "--load", saved]
        flags += ["--metrics-file", str(self.folder / "metrics.jsonl"), *self.flags]
        with open(self.folder / f"log{node}", "ab") as log:
            self.processes[node] = subprocess.Popen(
                [python, "tools/launch.py", *launcher, *self.script, *flags],
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1", **self.environ, **own},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return self.processes[node]

    def start_all(self) -> SupervisedRun:
        """Start all nodes."""
        for node in range(self.nodes):
            self.start(node)
        return self

    def wait(self, timeout_s: float = 150.0) -> list[int]:
        """Return the exit statuses of the supervisors, in the order of nodes."""
        deadline_s = time.monotonic() + timeout_s
        try:
            return [
                self.processes[node].wait(max(0.1, deadline_s - time.monotonic()))
                for node in sorted(self.processes)
            ]
        finally:
            self.kill()

    def kill(self) -> None:
        """End everything that still runs."""
        running = [process for process in self.processes.values() if process.poll() is None]
        ranks = self.rank_processes() if running and self.forks else {}
        for process in running:
            process.kill()
            process.wait()
        for pid in ranks.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def until(self, happened: Callable[[], bool], timeout_s: float = 100.0) -> None:
        """Wait until ``happened()``, or until a supervisor has ended."""
        deadline_s = time.monotonic() + timeout_s
        while not happened():
            if time.monotonic() > deadline_s:
                self.kill()
                raise AssertionError(self.said()[-4000:])
            if all(process.poll() is not None for process in self.processes.values()):
                return
            time.sleep(0.05)

    def said(self) -> str:
        """Return the output of all nodes."""
        return "".join(path.read_text(errors="replace") for path in self.folder.glob("log*"))

    def exit(self) -> dict[str, Any]:
        """Return the content of exit.json."""
        content: dict[str, Any] = json.loads((self.folder / "reports/exit.json").read_text())
        return content

    def numbers(self) -> dict[int, dict[str, Any]]:
        """Return the metrics of each iteration, without times; those of the last start count."""
        text = (self.folder / "metrics.jsonl").read_text()
        lines = [json.loads(line) for line in text.splitlines()]
        return {line["iteration"]: line for line in without_times(lines) if "lm loss" in line}

    def logged(self, iteration: int) -> bool:
        """Return whether the step is in the metrics file."""
        try:
            return iteration in self.numbers()
        except (OSError, ValueError):
            return False

    def rank_processes(self) -> dict[int, int]:
        """Return rank -> process id of the ranks that run, of all nodes."""
        found = {}
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                try:
                    environ = (folder / "environ").read_bytes().split(b"\0")
                    command = (folder / "cmdline").read_bytes().split(b"\0")
                except OSError:
                    continue
                values = dict(item.split(b"=", 1) for item in environ if b"=" in item)
                reports = str(self.folder / "reports").encode()
                is_ours = values.get(b"MEGATRON_EXIT_REPORT_DIR", b"").startswith(reports)
                if is_ours and b"RANK" in values and self.script[-1].encode() in command:
                    parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                    if values.get(b"MEGATRON_SUPERVISOR") == str(parent).encode() or parent == 1:
                        found[int(values[b"RANK"])] = int(folder.name)
        return found


def stop(pid: int) -> None:
    """Stop a process, as a hung driver would."""
    os.kill(pid, signal.SIGSTOP)
