"""Thousands of steps of the real program: memory, descriptors and threads must stay flat.

    python -m tests.support.soak --iterations 5000      (make soak N=5000)

Trains a tiny model twice, as one process and as two ranks under torchrun, with asynchronous saves,
evaluations, TensorBoard and a metrics file.  After the warm-up a line is fitted to the samples of
each quantity; exit status 1 if a slope is above its bound.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.support import forked
from tests.support.runs import ROOT, TINY
from tests.support.soak_probe import read_samples

SAVE_EVERY = 100
MODEL = (
    f"--eval-interval 200 --save-interval {SAVE_EVERY} --async-save --keep-last-checkpoints 2 "
    "--log-interval 100 --log-timers-to-tensorboard --log-memory-to-tensorboard "
    "--global-batch-size 4"
).split()
LAYOUTS = {
    "one process": (1, ()),
    "two ranks": (2, ("--use-distributed-optimizer", "--overlap-grad-reduce")),
}
# Objects are counted from this step on: each kind of work was done at least once.
FIRST_SAMPLE = 250
# CPython keeps up to 2,000 freed tuples of each length, until a full collection, as that of the
# first sample.  A length of which each step frees one more than it takes from there is full 2,000
# steps later.
WARM_UP = FIRST_SAMPLE + 2000
# Largest slopes, per step.  glibc grows a heap by 128 KiB or more at once and keeps it; one such
# step half-way tilts a line through 2,700 steps by 1.5 * 128 Ki / 2,700 = 73 bytes a step, and runs
# that stay flat over 14,000 steps show two: 146.  Saves that were freed late showed 251 and more.
BOUNDS = {
    "resident": 160.0,
    "private": 160.0,
    "descriptors": 0.0005,
    "threads": 0.0005,
}
# Blocks of Python's allocator: about 500 more are there after some thousands of steps, and no more
# after 14,000; an object that each step leaves would be 4,700, 25 that each save leaves 1,175.
BLOCKS = 1000
# One object left by each save would be 47.  A lock or file of another thread may live by chance.
OBJECTS = 10


def soak(
    folder: Path, iterations: int, num_ranks: int, flags: Sequence[str] = ()
) -> list[list[dict[str, Any]]]:
    """Train for ``iterations`` steps; the samples of each rank."""
    launcher = forked.torchrun(num_ranks) if num_ranks > 1 else [forked.python()]
    command = [*launcher, "-m", "tests.support.soak_probe", str(folder / "samples")]
    command += [str(FIRST_SAMPLE), str(SAVE_EVERY), *TINY, *MODEL, *flags]
    command += ["--train-iters", str(iterations)]
    command += ["--save", str(folder / "checkpoints"), "--tensorboard-dir", str(folder / "board")]
    command += ["--metrics-file", str(folder / "metrics.jsonl")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return [read_samples(folder / f"samples.{rank}") for rank in range(num_ranks)]


def slope(samples: Sequence[dict[str, Any]], quantity: str) -> float:
    """Growth of ``quantity`` per step: least squares over all samples."""
    steps = [sample["iteration"] for sample in samples]
    return float(np.polyfit(steps, [sample[quantity] for sample in samples], 1)[0])


def grown(samples: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Types of which there are more objects in the last sample than in the first: how many."""
    before, after = samples[0]["types"], samples[-1]["types"]
    more = {name: count - before.get(name, 0) for name, count in after.items()}
    return {name: count for name, count in sorted(more.items(), key=lambda m: -m[1]) if count > 0}


def report(every: Sequence[dict[str, Any]], warm_up: int) -> tuple[list[str], bool]:
    """A line for each quantity, and whether all of them stayed flat."""
    samples = [sample for sample in every if sample["iteration"] >= warm_up]
    lines = [f"  steps {samples[0]['iteration']} to {samples[-1]['iteration']}:"]
    is_flat = True
    for quantity, bound in BOUNDS.items():
        found = slope(samples, quantity)
        first, last = samples[0][quantity], samples[-1][quantity]
        verdict = "" if found <= bound else "   GROWS"
        is_flat &= found <= bound
        lines.append(
            f"  {quantity:14} {first:12,} -> {last:12,}   {found:10.4f} a step, "
            f"at most {bound:g}{verdict}"
        )
    begin, end = every[0], every[-1]
    more = {name: count for name, count in grown(every).items() if count >= OBJECTS}
    blocks = end["python_blocks"] - begin["python_blocks"]
    leaks = bool(more) or blocks > BLOCKS
    lines.append(
        f"  Python since step {begin['iteration']}: {blocks:+} blocks, {more or 'no'} objects more"
        + ("   GROWS" if leaks else "")
    )
    return lines, is_flat and not leaks


def main() -> int:
    """Soak every layout and print the slopes; 1 when one is above its bound."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--iterations", type=int, default=5000)
    parser.add_argument("--warm-up", type=int, default=WARM_UP, help="first step of the fits")
    parser.add_argument("--layout", choices=list(LAYOUTS), help="only this one")
    asked, flags = parser.parse_known_args()  # the others are those of pretrain_gpt.py
    all_flat = True
    for name in [asked.layout] if asked.layout else LAYOUTS:
        num_ranks, layout = LAYOUTS[name]
        started_at_s = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="soak-") as folder:
            ranks = soak(Path(folder), asked.iterations, num_ranks, [*layout, *flags])
        elapsed_s = time.monotonic() - started_at_s
        for rank, samples in enumerate(ranks):
            lines, is_flat = report(samples, asked.warm_up)
            all_flat &= is_flat
            print(f"{name}, rank {rank}, {elapsed_s:.0f} s", *lines, sep="\n", flush=True)
    return 0 if all_flat else 1


if __name__ == "__main__":
    sys.exit(main())
