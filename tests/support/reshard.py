"""Random pairs of layouts: what is saved in one and loaded in the other is the same, bit for bit.

    python -m tests.support.reshard --pairs 50 --first 0     (make fuzz-reshard N=50)

A pair is a function of its seed and of the table of features.  One run trains two steps, saves,
and trains one more; the other loads, and trains that step.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.formats import open_reader
from megatron.core.dist_checkpointing.records import OPTIMIZER_PREFIX, TensorRecord
from megatron.core.dist_checkpointing.validation import AMAX_HISTORY
from megatron.training.checkpointing.checkpoint_tensors import model_tensors, optimizer_tensors
from megatron.training.step import train_step as steps
from tests.distributed.test_fsdp import SHARD, Sharded
from tests.support.draws import without_stand_ins
from tests.support.layouts import TIMEOUT_S, Parts, allowed, assembled, dtype_of
from tests.support.ranks import run_ranks
from tests.support.runs import train_gpt
from tools.dev.lib.layout_axes import AXES, FEATURES, Case, Sizes, case_of, with_needs
from tools.dev.matrix import refusals

SAVED_AT, BATCH = 2, 12
DEGREES = {
    "tp": (1, 2, 4),
    "cp": (1, 1, 2),
    "pp": (1, 2, 3, 4),
    "dp": (1, 2, 3, 4),
    "instances": (1, 1, 2),
}
# Groups of features that say where a value lies, and of those that say which values there are.
LAYOUT = (*AXES, "sequence", "schedule", "stages", "mapping", "ep", "etp", "halves")
LAYOUT += ("host", "cut matrices", "codes gathered")
REDUCTION = ("gather", "reduce", "buckets", "bucket ends")  # of a wrapper that is not sharded
MODEL = ("optimizer", "output", "heads", "positions", "ahead", "norm", "mlp", "bias", "scores")
MODEL += ("shared", "gate", "which layers", "attention", "layers", "state", "codes", "ends")
# Over replicas: features, and what has no feature.
FORMATS = ("safetensors_dist", "safetensors_dist", "torch_dist", "torch")
SHARDED = ("", "zero-1", "zero-1", "zero-1", "fsdp2", "hsdp", "optim_grads", "optim_grads_params")


@dataclass(frozen=True)
class Pair:
    """Saved in the first layout, loaded in the second."""

    seed: int
    format: str
    saved: Case
    loaded: Case
    refused: int  # drawn and refused before

    def __str__(self) -> str:
        commands = (" ".join(case.command()) for case in (self.saved, self.loaded))
        sizes = (case.world_size for case in (self.saved, self.loaded))
        lines = [f"  {n} ranks: {command}" for n, command in zip(sizes, commands, strict=True)]
        return "\n".join([f"seed {self.seed}, {self.format}:", *lines])


def draw(seed: int, max_ranks: int = 8) -> Pair:
    """Two layouts of one model that `resolve` takes without a word."""
    rng, refused = random.Random(seed), 0
    while True:
        model = {name for name, f in FEATURES.items() if f.group in MODEL and not f.is_layout}
        chosen = {"experts"} if rng.random() < 0.4 else set()
        wished = _some(rng, {n for n in model if chosen or "experts" not in with_needs([n])})
        chosen |= {"bf16"} if rng.random() < 0.4 else set()
        layers, vocab = rng.choice((4, 4, 6)), rng.choice((60, 96, 101))
        kind = rng.choice(FORMATS)
        shuffled = rng.sample(sorted(wished), len(wished))
        for name in sorted(shuffled, key=lambda name: FEATURES[name].group != "layers"):
            wider = case_of({*chosen, name}, Sizes(depth=layers, vocab=vocab))
            if not (wider.has_alternatives or refusals(wider.command(), 1)):
                chosen.add(name)
        cases: list[Case] = []
        for _ in range(500):
            case = _any_layout(rng, chosen, layers, vocab, max_ranks)
            if case is None:
                continue
            argv = [*case.command(), "--save", "x", "--ckpt-format", kind]
            if without_stand_ins(refusals(argv, case.world_size)):
                refused += 1
            else:
                cases.append(case)
            if len(cases) == 2:
                return Pair(seed, kind, cases[0], cases[1], refused)


def _some(rng: random.Random, names: set[str]) -> set[str]:
    """One of about half the groups."""
    groups: dict[str, list[str]] = {}
    for name in sorted(names):
        groups.setdefault(FEATURES[name].group, []).append(name)
    return {rng.choice(g) for group, g in groups.items() if group in AXES or rng.random() < 0.5}


def _any_layout(
    rng: random.Random, model: set[str], layers: int, vocab: int, max_ranks: int
) -> Case | None:
    """Some layout, unless its stages hold another number of layers than ``layers``."""
    degrees = {axis: rng.choice(choices) for axis, choices in DEGREES.items()}
    kind = rng.choice(SHARDED) if degrees["dp"] > 1 else ""
    groups, is_plain = set(LAYOUT), kind in ("", "zero-1")
    if is_plain:
        groups |= set(REDUCTION)
    if kind != "zero-1":
        degrees["instances"] = 2 if kind == "hsdp" else 1
    replicas = degrees["dp"] * degrees["instances"]
    if prod(degrees.values()) > max_ranks or BATCH % replicas:
        return None
    axes = {axis for axis, degree in degrees.items() if degree > 1}
    needs = {name: with_needs([name]) for name, f in FEATURES.items() if f.group in groups}
    there = with_needs(model)
    fits = {
        name
        for name, needed in needs.items()
        if {FEATURES[n].axis for n in needed} - {""} <= axes
        and not ({"zero-1"} - {kind}) & needed
        and {n for n in needed if not FEATURES[n].is_layout} <= there
    }
    chosen = _some(rng, fits) | ({kind} & FEATURES.keys())
    share = BATCH // replicas
    micro = [n for n in (1, 2, 3, 4, 6) if share % n == 0 and share // n <= 4]
    sizes = Sizes(
        **{axis: degrees[axis] for axis in axes},
        ep=rng.choice((2, 4)),
        etp=rng.choice((1, 2)),
        depth=rng.randint(1, layers),
        vocab=vocab,
        micro=1 if case_of(model).is_of_micro_batch else rng.choice(micro),
    )
    case = case_of(model | chosen, sizes)
    if case.numbers()["layers"] != layers or case.world_size > max_ranks:
        return None
    flags = f"--global-batch-size {BATCH} --train-iters {SAVED_AT + 1}"
    return Sharded(
        case.features, sizes, f"{flags} {SHARD} {kind}" if kind.startswith("optim") else flags
    )


@dataclass
class Seen:
    """What one rank saw of a run."""

    state: Parts = field(default_factory=list)  # after step 2: weights and what the optimizer keeps
    after: Parts = field(default_factory=list)  # after step 3
    losses: list[float] = field(default_factory=list)  # of step 3, where the last stage is


def watch(rank: int, world_size: int, argv: Sequence[str]) -> Seen:
    """Train in this process."""
    seen, step = Seen(), steps.train_step

    def train_step(run: Any) -> Any:
        is_meant = run.state.iteration == SAVED_AT
        if is_meant:
            seen.state = _state(run)
        result = step(run)
        if is_meant:
            seen.after = _state(run)
            seen.losses = [float(loss) for loss in result.losses.values()]
        return result

    with (
        open(os.devnull, "w") as quiet,
        contextlib.redirect_stdout(quiet),
        mock.patch.object(steps, "train_step", train_step),
    ):
        train_gpt(rank, world_size, argv)
    return seen


def _state(run: Any) -> Parts:
    tensors = (*model_tensors(run.parts), *optimizer_tensors(run.parts))
    return [_whole(record) for record in tensors]


def _whole(record: TensorRecord) -> tuple[str, Tensor]:
    """The global tensor, with NaN where this rank does not hold it."""
    whole = torch.full(
        record.global_shape,
        torch.nan if record.dtype.is_floating_point else -1,
        dtype=record.dtype,
    )
    for piece in record.pieces:
        box = zip(piece.offset, piece.shape, strict=True)
        whole[tuple(slice(begin, begin + length) for begin, length in box)] = piece.data
    return record.key, whole


def differences(pair: Pair, folder: Path) -> list[str]:
    """What is other in the layout that loads than in the one that saved."""
    step = str(SAVED_AT)
    target = ["--save-interval", step, "--save", str(folder), "--ckpt-format", pair.format]
    saved = _run(pair.saved, target)
    loaded = _run(pair.loaded, ["--load", str(folder), "--ckpt-step", step])
    expected, torn = assembled([rank.state for rank in saved])
    found, torn_again = assembled([rank.state for rank in loaded])
    with open_reader(folder / f"iter_{SAVED_AT:07d}") as reader:
        stored = {key: reader.read(key) for key in reader.tensors}
    wrong = [f"copies of {key} differ" for key in (*torn, *torn_again)]
    wrong += [f"{key} is on one side only" for key in expected.keys() ^ found.keys()]
    wrong += [f"{key} is not stored as it was" for key in expected.keys() ^ stored.keys()]
    has_fewer_bits = any(FEATURES[name].group == "state" for name in pair.saved.features)
    for key in expected.keys() & found.keys() & stored.keys():
        wanted, main = expected[key], expected.get(f"{OPTIMIZER_PREFIX}state.fp32_param.{key}")
        same = torch.equal(found[key], wanted)
        if not same and main is not None and found[key].dtype == torch.bfloat16:
            same = _is_rounded(found[key], main, gathers_codes=_gathers_codes(pair.loaded))
        if not same and has_fewer_bits:
            same = _is_as_near_as_formats_allow(found[key], wanted)
        if not same:
            wrong.append(f"{key} is another")
        rows = expected[key].shape[0] if expected[key].dim() else None  # others store padding too
        if not torch.equal(stored[key][:rows], expected[key]):
            wrong.append(f"{key} is stored as another")
    if not any(".exp_avg." in key or ".momentum_buffer." in key for key in expected):
        wrong.append("the optimizer has no state")
    if dtype_of(pair.saved) == torch.float32 and not wrong:
        line = allowed(pair.saved)
        if {"lion", "muon", "muon-nesterov"} & pair.saved.features:
            # They move as far where a gradient is noise, and by another sign: twice a rate or so.
            # Scales of fp8 gradients follow the micro-batches of a rank: all directions are noise.
            has_codes = any(FEATURES[name].group == "codes" for name in pair.saved.features)
            line["weight"] = max(line["weight"], 4e-2 if has_codes else 6e-3)
        wrong = _different_steps(saved, loaded, line)
    return wrong


def _gathers_codes(case: Case) -> bool:
    return any(FEATURES[name].group == "codes gathered" for name in case.features)


def _is_rounded(weight: Tensor, main: Tensor, *, gathers_codes: bool) -> bool:
    """Whether a bf16 weight is what its layout makes of the main parameter.

    Gathered as fp8 codes it has their four significant bits.  Otherwise it is the nearest value; at
    a tie, which is rounded to even, or away from zero beside a 16-bit remainder.
    """
    if gathers_codes:
        off = (weight.float() - main).abs()
        return bool((off <= 2.0**-4 * main.abs() + 2.0**-16 * main.abs().max()).all())
    bits = main.contiguous().view(torch.int32)
    away = ((bits & -0x10000) + 0x10000).view(torch.float32).to(torch.bfloat16)
    is_tie = (bits & 0xFFFF) == 0x8000
    return bool(((weight == main.to(torch.bfloat16)) | (is_tie & (weight == away))).all())


def _is_as_near_as_formats_allow(found: Tensor, expected: Tensor) -> bool:
    """Fewer bits of what shares an exponent elsewhere; a 16-bit weight that was a tie."""
    off, line = (found - expected).abs(), 2.0**-15 * expected.abs().max()
    if expected.dtype == torch.bfloat16:
        line = line + 2.0**-7 * expected.abs()
    return bool((off <= line).all())


def _run(case: Case, more: Sequence[str]) -> list[Seen]:
    return run_ranks(watch, case.world_size, [*case.command(), *more], timeout_s=TIMEOUT_S)


def _different_steps(
    saved: Sequence[Seen], loaded: Sequence[Seen], line: dict[str, float]
) -> list[str]:
    """The step that follows uses what was loaded: losses by the weights, weights by the moments."""
    wrong = []
    losses = [next(rank.losses for rank in side if rank.losses) for side in (saved, loaded)]
    for old, new in zip(*losses, strict=True):
        if not abs(old - new) <= line["loss"] * abs(old):
            wrong.append(f"the loss of the next step is {new!r}, it was {old!r}")
    old, new = (assembled([rank.after for rank in side])[0] for side in (saved, loaded))
    for key in old:
        values, off = (old[key], new[key]), line["weight"]
        if key.endswith(AMAX_HISTORY):
            # A largest value may have the next code; gradients go by the micro-batches of a rank.
            values, off = (old[key][0], new[key][0]), off + 2**-4 * float(old[key][0].max())
        if not key.startswith("optimizer.") and not (
            float((values[0] - values[1]).abs().max()) <= off
        ):
            wrong.append(f"{key} of the next step is another")
    return wrong


def main() -> int:
    """Draw, run, sum up; 1 when a pair failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=50)
    parser.add_argument("--first", type=int, default=0, help="seed of the first pair")
    asked = parser.parse_args()
    features: Counter[str] = Counter()
    failed, refused, started_at_s = [], 0, time.monotonic()
    for seed in range(asked.first, asked.first + asked.pairs):
        pair = draw(seed)
        refused += pair.refused
        for case in (pair.saved, pair.loaded):
            features.update(name for name in case.features if FEATURES[name].is_layout)
            features[pair.format] += 1
            features.update(re.findall(r"strategy (optim_grads\w*)", " ".join(case.command())))
        with tempfile.TemporaryDirectory(prefix="reshard-") as folder:
            try:
                wrong = differences(pair, Path(folder))
            except AssertionError as error:  # a rank failed
                wrong = str(error).splitlines()[-20:]
        if wrong:
            failed.append(seed)
            print("\n    ".join([f"FAILED {pair}", *wrong[:20]]), flush=True)
    print(", ".join(f"{name} {count}" for name, count in features.most_common()))
    print(f"{asked.pairs} pairs from {asked.first} in {time.monotonic() - started_at_s:.0f} s")
    print(f"refused and drawn again: {refused}; failed: {len(failed)} {failed}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
