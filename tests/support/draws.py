"""Random layouts of random models, and a night of them.

    python -m tests.support.draws --draws 200 --first 0     (make fuzz N=200)
    python -m tests.support.draws --of t5                   which all have this feature

A draw is a function of its seed and of the table of features.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import count
from math import prod

import torch

from tests.support.layouts import (
    cuts_scales,
    disagreements,
    dtype_of,
    rounds_gradients_elsewhere,
)
from tools.dev.lib.layout_axes import AXES, FEATURES, Case, Sizes, case_of, with_needs
from tools.dev.matrix import MAX_RANKS, refusals

DEGREES = {
    "tp": (1, 2, 4),
    "cp": (1, 2, 4),
    "cp4": (1, 1, 1, 4),
    "pp": (1, 2, 3, 4),
    "dp": (1, 2, 3, 4, 8),
}
# Shares of draws with a feature of these groups, chosen together; of other groups half.
FIRST = {**dict.fromkeys(AXES, 0.9), "sequence": 0.7, "sharded": 0.3, "experts": 0.9, "ep": 0.7}
LIKELY = {"attention": 0.3, **dict.fromkeys(("precision", "codes", "state", "host"), 0.1)}
LIKELY |= dict.fromkeys(("reduced in", "left out", "ends", "codes gathered"), 0.05)
LIKELY |= {"activations": 0.2, "graphs": 0.2}
TRIES = 20  # on the same degrees, which may be refused beside the feature that was asked for
# On a CPU they have none, and stand-ins (`runs.train_gpt`, `layouts.trace`).
STAND_IN = tuple(
    f"{flag} is without effect"
    for flag in (
        "--optimizer-cpu-offload",
        "--cpu-offloading",
        "--fine-grained-activation-offloading",
        "--enable-cuda-graph",
    )
)
VOCABULARIES = (60, 96, 100, 112)  # one less than a prime: the token that ends a document


@dataclass(frozen=True)
class Draw:
    """A case that can start, and the reasons why others, drawn before it, could not."""

    seed: int
    case: Case
    refused: tuple[str, ...]
    of: str | None = None  # the feature that was asked for

    def __str__(self) -> str:
        features = " ".join(sorted(self.case.features))
        command = " ".join(self.case.command())
        of = f" --of {self.of}" if self.of else ""
        return (
            f"seed {self.seed}: {features}\n"
            f"  python -m tests.support.draws --draws 1 --first {self.seed}{of}\n"
            f"  torchrun --nproc-per-node {self.case.num_processes} pretrain_gpt.py {command}\n"
            f"  python pretrain_gpt.py {' '.join(self.case.command_alone())}"
        )


def draw(seed: int, of: str | None = None) -> Draw:
    """A case of several ranks from ``seed`` that `resolve` takes without a word.

    It grows from some feature on the drawn degrees, by features that are not refused beside those
    it has: in random order, so that none is left out for being refused often.
    """
    rng = random.Random(seed)
    refused: list[str] = []
    for attempt in count():
        if attempt % TRIES == 0:
            degrees, groups = _any_degrees(rng)
        sizes = _any_sizes(rng, degrees)
        chosen = [of or rng.choice(rng.choice(sorted(groups.items()))[1])]
        for group, share in FIRST.items():
            if group in groups and group not in _groups_of(chosen) and rng.random() < share:
                chosen.append(rng.choice(groups[group]))
        problems = _problems(case_of(chosen, sizes))
        if not problems:
            break
        refused.extend(problems)
    for group in rng.sample(sorted(groups), len(groups)):
        if group not in _groups_of(chosen) and rng.random() < LIKELY.get(group, 0.5):
            wider = [*chosen, rng.choice(groups[group])]
            problems = _problems(case_of(wider, sizes))
            refused.extend(problems)
            chosen = chosen if problems else wider
    return Draw(seed, case_of(chosen, sizes), tuple(refused), of)


def _any_degrees(rng: random.Random) -> tuple[dict[str, int], dict[str, list[str]]]:
    """Of the axes, and the features that are open on them, by group."""
    degrees: dict[str, int] = {}
    max_ranks = rng.choice((2, 4, MAX_RANKS))  # fewer ranks: more draws in the same time
    while not 2 <= prod(degrees.values()) <= max_ranks:
        degrees = {axis: rng.choice(choices) for axis, choices in DEGREES.items()}
    if 2 * prod(degrees.values()) <= max_ranks:
        degrees["instances"] = rng.choice((1, 2))
    return degrees, _open_groups(degrees, has_experts=rng.random() < 0.5)


def _problems(case: Case) -> list[str]:
    if not 1 < case.world_size <= MAX_RANKS:  # with axes that others need
        return ["N ranks are not several, or more than a test starts"]
    if case.has_alternatives:
        return ["alternatives of each other"]
    if _is_decided_by_rounding(case):
        return ["what amplifies noise, and noise"]
    problems = refusals(case.command(), case.num_processes) + refusals(case.command_alone(), 1)
    return without_stand_ins(problems)


def _is_decided_by_rounding(case: Case) -> bool:
    """Whether tokens go to other experts, or directions without a gradient to another side."""
    has_key_biases = {"images-and-sound", "images-of-any-size"} & case.features
    if "lion" in case.features and has_key_biases:  # those of Whisper, CLIP and Qwen2-VL
        return True
    is_noisy = dtype_of(case) != torch.float32 or ("nvfp4" in case.features and cuts_scales(case))
    is_noisy |= rounds_gradients_elsewhere(case)
    return is_noisy and bool({"experts", "muon", "muon-nesterov"} & case.features)


def without_stand_ins(problems: list[str]) -> list[str]:
    """Those that stay where a test stands in for what a CPU lacks."""
    return [problem for problem in problems if not problem.startswith(STAND_IN)]


def _groups_of(names: list[str]) -> set[str]:
    return {FEATURES[name].group for name in with_needs(names)}


def _open_groups(degrees: dict[str, int], *, has_experts: bool) -> dict[str, list[str]]:
    """Features, by group, whose axes are on."""
    axes = {axis for axis, degree in degrees.items() if degree > 1}
    groups: dict[str, list[str]] = {}
    for feature in FEATURES.values():
        needs = with_needs([feature.name])
        wanted = {FEATURES[name].axis for name in needs} - {""}
        is_open = has_experts or "experts" not in needs
        if wanted <= axes and is_open:
            groups.setdefault(feature.group, []).append(feature.name)
    return groups


def _any_sizes(rng: random.Random, degrees: dict[str, int]) -> Sizes:
    return Sizes(
        **{axis: degree for axis, degree in degrees.items() if degree > 1},
        experts=rng.choice((4, 6, 8)),
        ep=rng.choice((2, 2, 3, 4, 8)),
        etp=rng.choice((1, 2, 4)),
        topk=rng.choice((1, 2, 2, 3)),
        depth=rng.choice((1, 2)),
        seq=rng.choice((16, 32)),
        vocab=rng.choice(VOCABULARIES),
        micro=rng.choice((1, 2, 3)),
        microbatches=rng.choice((1, 2, 3, 4, 6)),
    )


@dataclass
class Night:
    """What a series of draws has shown."""

    features: Counter[str] = field(default_factory=Counter)
    rules: Counter[str] = field(default_factory=Counter)  # with which draws were refused
    settled: list[int] = field(default_factory=list)  # over the line in fp32, not in fp64
    failed: dict[int, str] = field(default_factory=dict)

    def add(self, drawn: Draw) -> None:
        """Run a draw."""
        self.features.update(drawn.case.features)
        self.rules.update(re.sub(r"\d+", "N", problem) for problem in drawn.refused)
        try:
            wrongs = disagreements(drawn.case)
        except AssertionError as error:  # a rank failed
            wrongs = [str(error).splitlines()[-20:]]
        if wrongs[-1]:
            self.failed[drawn.seed] = "\n    ".join([str(drawn), *wrongs[-1]])
            print(f"FAILED {self.failed[drawn.seed]}", flush=True)
        elif len(wrongs) > 1:
            self.settled.append(drawn.seed)

    def summary(self) -> str:
        """How many, which features how often, what was refused, what failed."""
        lines = ["refused combinations, which were drawn again:"]
        lines += [f"  {count:4} {rule}" for rule, count in self.rules.most_common()]
        lines += ["features:"]
        lines += [f"  {self.features[name]:4} {name}" for name in FEATURES]
        lines += [f"settled in fp64: {len(self.settled)} {self.settled}"]
        lines += [f"failed: {len(self.failed)} {sorted(self.failed)}"]
        lines += [f"  {text}" for text in self.failed.values()]
        return "\n".join(lines)


def main() -> int:
    """Draw, run, sum up; 1 when a draw failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="seed of the first draw")
    parser.add_argument("--of", choices=list(FEATURES), help="a feature that all draws have")
    asked = parser.parse_args()
    night, started_at_s = Night(), time.monotonic()
    for seed in range(asked.first, asked.first + asked.draws):
        night.add(draw(seed, asked.of))
    print(night.summary())
    print(f"{asked.draws} draws from {asked.first} in {time.monotonic() - started_at_s:.0f} s")
    return 1 if night.failed else 0


if __name__ == "__main__":
    sys.exit(main())
