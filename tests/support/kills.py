"""kill -9 around saves, again and again, and the unbroken run that every life must be part of.

    python -m tests.support.kills --kills 200 --first 0     (make kill N=200)
    python -m tests.support.kills --of fewer-bits           with what else there is to lose

Lives follow each other in one directory: each loads what the one before left, trains, saves in one
of the formats, at once or in the background, and dies at a moment that its seed decides.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from megatron.core.diagnostics.fault_injection import POINTS
from megatron.core.dist_checkpointing.folders import choose
from megatron.core.dist_checkpointing.formats import open_reader
from megatron.training.callbacks import periodic
from tests.support.ranks import run_ranks
from tests.support.runs import TINY, train_gpt, without_times

NUM_RANKS, NUM_STEPS, EVERY = 2, 12, 2
BASE = (
    f"--train-iters {NUM_STEPS} --seq-length 16 --global-batch-size 4 --eval-iters 0 --swiglu "
    "--hidden-dropout 0.1 --use-distributed-optimizer --overlap-grad-reduce --bf16 "
    f"--save-interval {EVERY}"
)
MODELS = {
    "bf16": "",
    "fewer-bits": "--fp8-format hybrid --fp8-amax-history-len 4 --fp8-param-gather "
    "--overlap-param-gather --use-precision-aware-optimizer --exp-avg-dtype bf16 "
    "--exp-avg-sq-dtype fp8 --main-grads-dtype bf16",
    "on-host": "--optimizer-cpu-offload --optimizer-offload-fraction 0.5 "
    "--overlap-cpu-optimizer-d2h-h2d --use-precision-aware-optimizer "
    "--cpu-offloading --cpu-offloading-num-layers 1 --loss-chunk-size 7",
}
FORMATS = ("safetensors_dist", "safetensors_dist", "safetensors_dist", "torch_dist", "torch")
NOT_HERE = ("save.displaced", "save.copy", "evaluate.iter", "step.gradient")
AT = tuple(point for point in POINTS if point not in NOT_HERE)
ON_RANK_0 = POINTS[POINTS.index("save.before_manifest") : POINTS.index("save.copy")]
SAVED = re.compile(r"successfully saved checkpoint from iteration +(\d+) to")


@dataclass(frozen=True)
class Kill:
    """Who dies when: ``after_s`` seconds from the beginning of the save of a step, or at ``point``.

    ``num_saves`` is counted from the start of the life.
    """

    seed: int
    flags: tuple[str, ...]
    num_saves: int
    rank: int | None  # None: all
    after_s: float | None
    point: str | None


def draw(seed: int, save_s: float, model: str) -> Kill:
    """Half of them at named points; ``save_s``: how long a save takes, over a part of which."""
    rng = random.Random(seed)
    # The last has no place for histories of scales.
    flags = ["--ckpt-format", rng.choice(FORMATS[:-1] if "fp8" in MODELS[model] else FORMATS)]
    flags += ["--async-save"] if rng.random() < 0.5 else []
    flags += ["--keep-last-checkpoints", "2"]
    rank = rng.choice((None, *range(NUM_RANKS)))
    num_saves = rng.choice((1, 2))
    after_s, point = rng.uniform(0, 1.3 * save_s), None
    if rng.random() < 0.5:
        after_s, point = None, rng.choice(AT)
        if point in (*ON_RANK_0, "save.begin"):
            rank = 0 if rank == 1 else rank
    return Kill(seed, tuple(flags), num_saves, rank, after_s, point)


def live(rank: int, world_size: int, argv: Sequence[str], log: str, kill: Kill | None) -> None:
    """One life of a rank; what it says goes into ``log`` line by line."""
    save, saves = periodic.save, 0

    def save_and_die(run: Any, **how: Any) -> None:
        nonlocal saves
        saves += 1
        is_meant = kill is not None and kill.num_saves == saves and kill.rank in (None, rank)
        if is_meant and kill.after_s is not None:
            kill_in(kill.after_s)
        if is_meant and kill.point is not None:
            os.environ["FAULTS"] = f"{kill.point}:kill"
        save(run, **how)

    if kill is not None and str(kill.point).startswith("load.") and kill.rank in (None, rank):
        os.environ["FAULTS"] = f"{kill.point}:kill"
    with (
        open(log, "a", buffering=1) as heard,
        contextlib.redirect_stdout(heard),
        contextlib.redirect_stderr(heard),
        mock.patch.object(periodic, "save", save_and_die),
    ):
        train_gpt(rank, world_size, argv)


def kill_in(seconds: float) -> None:
    """SIGKILL for this process from a timer of the kernel, whatever it is doing then."""
    rt = ctypes.CDLL("librt.so.1", use_errno=True)
    event = (ctypes.c_int * 16)(0, 0, signal.SIGKILL, 0)  # value, number, SIGEV_SIGNAL
    timer = ctypes.c_void_p()
    nanoseconds = max(1, int(seconds * 1e9))
    when = (ctypes.c_long * 4)(0, 0, nanoseconds // 10**9, nanoseconds % 10**9)
    if rt.timer_create(time.CLOCK_MONOTONIC, event, ctypes.byref(timer)) or rt.timer_settime(
        timer, 0, when, None
    ):
        raise OSError(ctypes.get_errno(), "no timer")


def numbers(root: Path) -> dict[int, dict[str, Any]]:
    """Iteration -> what was logged, without times."""
    lines = [json.loads(line) for line in (root / "metrics").read_text().splitlines()]
    return {line["iteration"]: line for line in without_times(lines)}


def content(folder: Path) -> dict[str, torch.Tensor]:
    """Weights and moments, every byte verified."""
    with open_reader(folder) as reader:
        reader.check_files()
        return {key: reader.read(key) for key in reader.tensors}


@dataclass
class Storm:
    """A directory in which runs die, and what has become of it."""

    folder: Path
    model: str = "bf16"
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    newest: int = 0

    def __post_init__(self) -> None:
        self.root, self.straight = self.folder / "killed", self.folder / "straight"
        began_s = time.monotonic()
        self._run(self.straight, ())
        self.save_s = (time.monotonic() - began_s) / NUM_STEPS / 2
        self.expected = numbers(self.straight)
        self.contents = {
            i: content(self.straight / f"iter_{i:07d}") for i in range(EVERY, NUM_STEPS + 1, EVERY)
        }

    def strike(self, seed: int) -> bool:
        """Let one more life begin and die, and look at what it leaves; whether it was killed."""
        if self.newest > NUM_STEPS - 2 * EVERY:  # too little is left to die in
            self._run(self.root, ())
            self.outcomes["ran to the end between kills"] += 1
            self._look(f"before seed {seed}", ended=True)
            shutil.rmtree(self.root)
            self.newest = 0
        kill = draw(seed, self.save_s, self.model)
        before, was_killed = self.newest, False
        try:
            self._run(self.root, kill.flags, kill)
        except AssertionError as error:
            was_killed = "SIGKILL" in str(error)
            if not was_killed:
                self.wrong.append(f"{kill}: {error}")
        self._look(str(kill))
        if not was_killed:
            self.outcomes["came too late, at the end of a run"] += 1
            return False
        self.outcomes["of all ranks" if kill.rank is None else "of one rank"] += 1
        self.outcomes["in the background" if "--async-save" in kill.flags else "at once"] += 1
        self.outcomes["at a random moment" if kill.point is None else "at a named point"] += 1
        gained = (self.newest - before) // EVERY
        self.outcomes[f"in save {kill.num_saves} of its life, {gained} published"] += 1
        return True

    def _run(self, root: Path, flags: Sequence[str], kill: Kill | None = None) -> None:
        argv = [*TINY, *BASE.split(), *MODELS[self.model].split(), *flags]
        argv += ["--metrics-file", str(root / "metrics"), "--save", str(root), "--load", str(root)]
        root.mkdir(exist_ok=True)
        run_ranks(live, NUM_RANKS, argv, str(root / "log"), kill, timeout_s=120)

    def _look(self, what: str, *, ended: bool = False) -> None:
        """The newest checkpoint is whole, and that of the unbroken run; so are all numbers."""
        said = [int(found) for found in SAVED.findall((self.root / "log").read_text())]
        choice = choose(self.root)
        found = choice.found.iteration if choice else 0
        assert found is not None
        if found < max([self.newest, *said, NUM_STEPS if ended else 0]):
            self.wrong.append(f"{what}: {found} is loaded, {self.newest} was there, said {said}")
        self.newest = found
        if choice:
            stored, others = content(choice.found.folder), []
            for key, values in self.contents[found].items():
                rows = values.shape[0] if values.dim() else None  # others store padding too
                if key not in stored or not torch.equal(stored[key][:rows], values):
                    others.append(key)
            if others:
                self.wrong.append(f"{what}: {found} is not that of the unbroken run: {others[:3]}")
        if (self.root / "metrics").exists():
            logged = numbers(self.root)
            others = [i for i, line in logged.items() if line != self.expected[i]]
            if others:
                first, there = logged[others[0]], self.expected[others[0]]
                self.wrong.append(f"{what}: other numbers in {others}, {first} instead of {there}")

    def summary(self) -> str:
        lines = [f"  {count:4} {what}" for what, count in sorted(self.outcomes.items())]
        return "\n".join([*lines, f"wrong: {len(self.wrong)}", *(f"  {w}" for w in self.wrong)])


def main() -> int:
    """Kill, sum up; 1 when something was lost or other than in the unbroken run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="seed of the first kill")
    parser.add_argument("--of", choices=list(MODELS), default="bf16", help="what is trained")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kills-") as folder:
        storm, started_at_s = Storm(Path(folder), asked.of), time.monotonic()
        seed, struck = asked.first, 0
        while struck < asked.kills and not storm.wrong:
            struck += storm.strike(seed)
            seed += 1
    elapsed_s = time.monotonic() - started_at_s
    print(f"{struck} kills, seeds {asked.first} to {seed - 1}, in {elapsed_s:.0f} s")
    print(storm.summary())
    return 1 if storm.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
