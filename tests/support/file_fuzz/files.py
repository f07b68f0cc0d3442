"""Damaged and forged files of every kind, and a night of them.

    python -m tests.support.file_fuzz.files --cases 5000 --first 0     (make fuzz-files N=5000)
    python -m tests.support.file_fuzz.files --of yaml --cases 1 --first 17

A parser may refuse a file by a MegatronError that names it, or read what was there before
(`targets.Change`).  All else is a failure: another exception, other values, a message without the
file, more than `SECONDS`, or memory that the file cannot account for.
"""

from __future__ import annotations

import argparse
import math
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron.core.config.errors import MegatronError
from megatron.core.dist_checkpointing import commit
from tests.support.file_fuzz.other_targets import OTHERS
from tests.support.file_fuzz.targets import CHECKPOINTS, Change, Content, Target, again

TARGETS = {target.name: target for target in (*CHECKPOINTS, *OTHERS)}
FAILURES = ("traceback", "hang", "wrong", "memory", "unnamed")
SECONDS = 20
_MORE_BYTES = 3 << 30  # than before a case; samples have 1 MB
_NO_MEMORY = re.compile(r"MemoryError|allocate|not enough memory", re.IGNORECASE)


class Hang(BaseException):
    """A case took longer than `SECONDS`."""


@dataclass
class Score:
    """What has become of the files of one parser."""

    outcomes: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)


class Fuzzer:
    """Changes copies of the sample of ``target`` in ``folder``."""

    def __init__(self, target: Target, folder: Path) -> None:
        self.target, self._whole, self._work = target, folder / "whole", folder / "work"
        self._whole.mkdir(parents=True)
        target.make(self._whole)
        self.before = target.read(shutil.copytree(self._whole, self._work))
        self.score = Score()

    def run(self, seed: int) -> str:
        """Try the case of ``seed``; what became of it."""
        rng = random.Random(f"{self.target.name}-{seed}")
        shutil.rmtree(self._work)
        shutil.copytree(self._whole, self._work)
        commit._claimed.clear()
        change = self.target.change(self._work, rng)
        with limits():
            outcome, why = self._outcome(change)
        self.score.outcomes[outcome] += 1
        if outcome in FAILURES:
            self.score.failed.append(
                f"{self.target.name} seed {seed}, {change.what} ({change.strict}): {outcome}: {why}"
            )
        return outcome

    def _outcome(self, change: Change) -> tuple[str, str]:
        try:
            found = again(self.target, self._work, self.before)
        except MegatronError as error:
            if _NO_MEMORY.search(str(error)):
                return "memory", str(error)
            is_named = str(self._work) in str(error)
            return ("refused", "") if is_named else ("unnamed", str(error))
        except Hang:
            return "hang", "".join(traceback.format_stack(limit=3))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a library's panic is no Exception
            is_memory = isinstance(error, MemoryError) or _NO_MEMORY.search(str(error))
            return "memory" if is_memory else "traceback", traceback.format_exc(limit=-4)
        wrong = differing(self.before, found, change.strict)
        return ("wrong", wrong) if wrong else ("loaded", "")


def differing(before: Content, found: Content, strict: str) -> str:
    """The names of values that are others; empty if all that counts is as before."""
    if strict == "none" or found.get("notes"):
        return ""
    names = before.keys() if strict == "all" else {"tensors"} & before.keys()
    return ", ".join(name for name in names if not is_same(before[name], found.get(name)))


def is_same(one: Any, other: Any) -> bool:
    """Whether two trees of values are bitwise the same; NaN is NaN."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    if isinstance(one, float) and math.isnan(one):
        return isinstance(other, float) and math.isnan(other)
    return bool(one == other)


@contextmanager
def limits() -> Iterator[None]:
    """Raise Hang, and MemoryError, in what takes too much."""

    def stop(*_: Any) -> None:
        raise Hang

    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.signal(signal.SIGALRM, stop)
    resource.setrlimit(resource.RLIMIT_AS, (used + _MORE_BYTES, hard))
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def main() -> int:
    """Fuzz, sum up; 1 when anything failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=1000, help="files of each kind")
    parser.add_argument("--first", type=int, default=0, help="seed of the first")
    parser.add_argument("--of", choices=list(TARGETS), action="append", help="kinds; default all")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    totals: Counter[str] = Counter()
    columns = ("refused", "loaded", *FAILURES)
    print(f"{'files of':26}{'tried':>8}" + "".join(f"{c:>11}" for c in columns), flush=True)
    for name in asked.of or TARGETS:
        began_s = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="files-") as folder:
            fuzzer = Fuzzer(TARGETS[name], Path(folder))
            for seed in range(asked.first, asked.first + asked.cases):
                fuzzer.run(seed)
        outcomes = fuzzer.score.outcomes
        totals.update(outcomes)
        counts = "".join(f"{outcomes[column]:11}" for column in columns)
        print(f"{name:26}{asked.cases:8}{counts}  {time.monotonic() - began_s:.0f} s", flush=True)
        for text in fuzzer.score.failed[:20]:
            print(f"  {text}", flush=True)
    print(f"{'all':26}{totals.total():8}" + "".join(f"{totals[c]:11}" for c in columns))
    return int(any(totals[kind] for kind in FAILURES))


if __name__ == "__main__":
    sys.exit(main())
