"""pretrain_gpt.py with a callback that samples its process: one run of `tests.support.soak`.

    python -m tests.support.soak_probe SAMPLES.jsonl FIRST EVERY FLAGS_OF_PRETRAIN_GPT...

Each rank writes a JSON line to SAMPLES.jsonl.RANK at step FIRST and every EVERY steps after it; its
first and its last line hold also the number of Python objects of each type and of blocks that
Python has allocated, both after a full collection.
"""

from __future__ import annotations

import gc
import json
import os
import re
import runpy
import sys
import threading
from pathlib import Path
from typing import Any
from unittest import mock

from megatron.training import training
from megatron.training.callbacks.periodic import poll
from megatron.training.runtime.context import StepResult
from megatron.training.step.run import Callback, TrainingRun
from tests.support.runs import ROOT

_KIB = re.compile(r"^(\w+):\s+(\d+) kB$", re.MULTILINE)


class Probe(Callback):
    """Appends samples of this process to ``path``, from step ``first`` on."""

    def __init__(self, path: Path, first: int, every: int) -> None:
        # Not a Path: in Python 3.12 it makes and keeps a list at its first use.
        self._path = os.fspath(path)
        self._first = first
        self._every = every

    def on_step_end(self, run: TrainingRun, result: StepResult) -> None:
        iteration = run.state.iteration
        if iteration < self._first or (iteration - self._first) % self._every:
            return
        finish_save(run)
        is_end = iteration == self._first or iteration + self._every > run.train_iters
        line: dict[str, Any] = {"iteration": iteration, **sample()}
        if is_end:
            gc.collect()
            line |= {"types": types_of_objects(), "python_blocks": sys.getallocatedblocks()}
        with open(self._path, "a") as file:
            file.write(json.dumps(line) + "\n")


def finish_save(run: TrainingRun) -> None:
    """Wait for a save in the background, whose threads and copies are no leak.  Collective."""
    while run.checkpoints.pending is not None:
        poll(run)
    for thread in threading.enumerate():
        if thread.name == "checkpoint":
            thread.join()


def read_samples(path: Path) -> list[dict[str, Any]]:
    """What a `Probe` has written."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def sample() -> dict[str, int]:
    """Memory in bytes and numbers of resources of this process; nothing is collected for it."""
    status = dict(_KIB.findall(Path("/proc/self/status").read_text()))
    rollup = dict(_KIB.findall(Path("/proc/self/smaps_rollup").read_text()))
    return {
        "resident": 1024 * int(status["VmRSS"]),
        "private": 1024 * (int(rollup["Private_Dirty"]) + int(rollup["Swap"])),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
    }


def types_of_objects() -> dict[str, int]:
    """Name of each type -> number of its objects that the garbage collector tracks."""
    counts: dict[str, int] = {}  # a Counter would fill a cache of abc with types it has not met
    for kind in map(type, gc.get_objects()):
        name = f"{kind.__module__}.{kind.__qualname__}"
        # The device of tests.support.host_gpu keeps the calls of NCCL until the end.
        if not name.startswith("tests.support.host_gpu."):
            counts[name] = counts.get(name, 0) + 1
    return counts


def main() -> None:
    """Train with the flags that follow, sampling."""
    path, first, every, *flags = sys.argv[1:]
    rank = os.environ.get("RANK", "0")
    built = training.default_callbacks

    def with_probe(run: Any) -> Any:
        callbacks = built(run)
        callbacks.append(Probe(Path(f"{path}.{rank}"), int(first), int(every)))
        return callbacks

    script = str(ROOT / "pretrain_gpt.py")
    with (
        mock.patch.object(training, "default_callbacks", with_probe),
        mock.patch("sys.argv", [script, *flags]),
    ):
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
