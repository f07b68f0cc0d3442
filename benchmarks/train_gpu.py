"""Measure training speed and memory on one GPU, against peers and a large matmul.

    python -m benchmarks.train_gpu --shape 1.3b [--rounds 5] [--steps 10] [--output rows.jsonl]
    python -m benchmarks.train_gpu --device cpu --tiny       (that it works, on any machine)

Each contender runs in a process of its own, which starts when the one before has ended: it has the
device alone.  Of several shapes, all train our contender first, then the next one.  A step
accumulates the gradients of eight micro-batches, whose tokens lie in page-locked memory.  A turn of
steps is timed as a whole, with a synchronization of the device at its end; the result is the median
of turns.  TFLOP/s count the forward pass once and the backward pass twice, attention without its
masked half, and no recomputation.  "Of the product" divides by the median rate of a matmul of
8192 x 8192 bf16 matrices that is repeated for a tenth of a second, at the clock that the power
limit then allows; "of the peak" by the manufacturer's value.  Peak memory is that of the allocator
in the timed steps (on a CPU, of the process).  The row of a contender is void if its losses differ
by more than 0.5 % from ours in bf16 (1 % for fp8).  A row is printed when its contender has ended,
and the tables last: a measurement that is cut short is not lost.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from benchmarks import gpu_contenders
from benchmarks.gpu_contenders import SHAPES, Shape, contenders, make_trainer
from megatron.core import device
from megatron.training.arguments.parser import parse_args
from megatron.training.arguments.resolve import resolve
from megatron.training.estimates.flops import causal_model_flops, known_peak
from megatron.training.estimates.parameters import known_padded_vocab_size
from megatron.training.planning.out_of_memory import is_lack_of_memory

COMPARED_STEPS = 20
MATMUL = "product"  # the contender that measures a matmul
_START_S = 15  # a contender that has less time does not start
_GIB = 2**30
Found = dict[str, Any]


def main() -> None:
    """Measure and print."""
    asked = _arguments()
    if asked.worker is not None:
        serve(asked)
        return
    device.choose(asked.device)
    names = ["tiny", "tiny-llama", "tiny-moe"] if asked.tiny else asked.shape.split(",")
    found: dict[str, dict[str, Found]] = {name: {} for name in names}
    for shape, contender, one in measure(asked, [SHAPES[name] for name in names]):
        if contender == MATMUL:  # that of all shapes
            for of_shape in found.values():
                of_shape[MATMUL] = one
            continue
        found[shape.name][contender] = one
        *_, row = table(shape, found[shape.name].items())
        print(f"{shape.name}: {row}", flush=True)
    for name in names:
        print("\n".join(table(SHAPES[name], found[name].items())), flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", default="124m", help=f"comma-separated: {', '.join(SHAPES)}")
    parser.add_argument("--tiny", action="store_true", help="all tiny shapes")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each contender")
    parser.add_argument("--steps", type=int, default=4, help="steps of one turn")
    parser.add_argument("--warmup", type=int, default=3, help="steps before the first turn")
    parser.add_argument("--contenders", default=None, help="comma-separated; default: all")
    parser.add_argument("--ours", default="", help="further flags of ours")
    parser.add_argument("--limit-s", type=float, default=600, help="seconds of one contender")
    parser.add_argument("--total-s", type=float, default=1e5, help="seconds of all contenders")
    parser.add_argument("--output", default=None, help="append what was found as JSON")
    parser.add_argument("--worker", default=None, help=argparse.SUPPRESS)
    return parser.parse_args()


# -- the parent --------------------------------------------------------------------------------


def measure(
    asked: argparse.Namespace, shapes: Sequence[Shape]
) -> Iterator[tuple[Shape, str, Found]]:
    """Yield per contender the seconds per step of each turn, its losses and its peak memory.

    The matmul comes first and once, then the first contender of each shape, and so on.
    """
    ends_s = time.monotonic() + asked.total_s
    names = [asked.contenders.split(",") if asked.contenders else contenders(s) for s in shapes]
    rounds = itertools.zip_longest(*names)
    jobs = [(s, name) for each in rounds for s, name in zip(shapes, each, strict=True) if name]
    for shape, name in [(shapes[0], MATMUL), *jobs]:
        worker = Worker(asked, shape, name, min(asked.limit_s, ends_s - time.monotonic()))
        for _ in range(asked.rounds):
            worker.turn()
        worker.stop()
        if asked.output is not None:  # at once: a lease may end before the last contender
            row = {
                "shape": shape.name,
                "device": device.name(),
                "torch": torch.__version__,
                name: worker.found,
            }
            with open(asked.output, "a") as file:
                file.write(json.dumps(row) + "\n")
        yield shape, name, worker.found


class Worker:
    """Contender in its own process, which starts with its first turn and ends after ``limit_s``."""

    def __init__(self, asked: argparse.Namespace, shape: Shape, name: str, limit_s: float) -> None:
        self.name, self.found = name, {"step_s": [], "losses": [], "peak": 0.0, "failed": None}
        if limit_s < _START_S:
            self.found["failed"] = "skipped: no time is left"
        self._command = [
            *(sys.executable, "-m", "benchmarks.train_gpu", "--worker", name),
            *("--shape", shape.name, "--device", asked.device, "--ours", asked.ours),
            *("--steps", str(asked.steps), "--warmup", str(asked.warmup)),
        ]
        self._process: subprocess.Popen[str] | None = None
        self._limit = threading.Timer(limit_s, self._give_up)
        self._is_late = False

    def turn(self) -> None:
        """Run one turn of steps; do nothing after a failure."""
        if self.found["failed"] is not None:
            return
        if self._process is None:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            self._limit.start()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, and answers nothing
            self._process.stdin.write("turn\n")
            self._process.stdin.flush()
        answers = (json.loads(x) for x in self._process.stdout if x.startswith('{"step_s"'))
        answer = next(answers, {"failed": "ended", "step_s": [], "losses": [], "peak": 0.0})
        if self._is_late:
            answer["failed"] = f"not finished in {self._limit.interval:.0f} s"
        self.found["step_s"] += answer["step_s"]
        self.found["losses"] += answer["losses"]
        self.found["peak"] = max(self.found["peak"], answer["peak"])
        self.found["failed"] = answer["failed"]

    def stop(self) -> None:
        """End the process."""
        if self._process is not None:
            assert self._process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
            self._process.wait()
            self._process = None
        self._limit.cancel()

    def _give_up(self) -> None:
        self._is_late = True
        if self._process is not None:
            self._process.kill()


def flops_of_step(shape: Shape) -> float:
    """Return the FLOPs of a step, by the function that the log's MFU uses."""
    config = resolve(parse_args(argv=gpu_contenders.flags(shape, "ours")), 1)
    padded = known_padded_vocab_size(config)
    assert padded is not None
    return causal_model_flops(config, shape.rows, padded).total


def table(shape: Shape, measured: Iterable[tuple[str, Found]]) -> Iterator[str]:
    """Yield the table, one row per contender; the first one is the matmul."""
    contestants = iter(measured)
    _, matmul = next(contestants)
    product = statistics.median(matmul["losses"] or [math.nan])
    flops = flops_of_step(shape)
    yield (
        f"\n{shape.name}: {shape.layers} layers, {shape.hidden} wide, {shape.rows} x {shape.seq} "
        f"tokens, vocabulary {shape.vocab}; {device.name()}, torch {torch.__version__}; "
        f"{flops / 1e12:.4g} TFLOP a step, matrix product {product / 1e12:.4g} TFLOP/s\n"
    )
    yield (
        "| contender | tokens/s | TFLOP/s | of the peak | of the product | ours / it | peak GiB "
        "| loss gap |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    reference: Found = {"losses": [], "step_s": []}
    for name, one in contestants:
        if name == "ours":
            reference = one
        yield _row(shape, name, one, reference, flops, product)


def _row(
    shape: Shape, name: str, one: Found, reference: Found, flops: float, product: float
) -> str:
    if not one["step_s"]:
        return f"| {name} | {one['failed']} | | | | | | |"
    peak = known_peak(device.name()) or math.nan
    step_s = statistics.median(one["step_s"])
    rate = flops / step_s
    ratio = step_s / statistics.median(reference["step_s"] or [math.nan])
    gap = loss_gap(reference["losses"], one["losses"])
    is_void = not gap <= (0.01 if "fp8" in name else 0.005)  # nor if one is NaN
    return (
        f"| {name} | {shape.rows * shape.seq / step_s:,.0f} | {rate / 1e12:.4g} | "
        f"{rate / peak:.1%} | {rate / product:.1%} | {ratio:.3f} | {one['peak'] / _GIB:.2f} | "
        f"{gap:.3%}{' VOID' if is_void else ''} |"
    )


def loss_gap(ours: list[float], theirs: list[float]) -> float:
    """Return the largest relative difference over the first steps."""
    pairs = list(zip(ours, theirs, strict=False))[:COMPARED_STEPS]
    gaps = [abs(a - b) / abs(a) for a, b in pairs]
    return math.nan if any(map(math.isnan, gaps)) else max(gaps, default=math.nan)


# -- a contender -------------------------------------------------------------------------------


def serve(asked: argparse.Namespace) -> None:
    """Run one turn for every line on stdin, with a warmup before the first."""
    device.choose(asked.device)
    trainer, losses, count = None, [], asked.warmup
    for _ in sys.stdin:
        answer: Found = {"step_s": [], "losses": [], "peak": 0.0, "failed": None}
        try:
            trainer = trainer or make_trainer(asked.worker, SHAPES[asked.shape], asked.ours)
            losses += [trainer.step() for _ in range(count)]
            device.synchronize()
            if device.is_cuda():  # without what made the model and compiled it
                torch.cuda.reset_peak_memory_stats()
            began_s = time.perf_counter()
            losses += [trainer.step() for _ in range(asked.steps)]
            device.synchronize()
            answer["step_s"] = [(time.perf_counter() - began_s) / asked.steps]
        except (RuntimeError, MemoryError) as error:
            if not is_lack_of_memory(error):
                raise
            answer["failed"] = "out of memory"
        answer["losses"] = [float(loss) for loss in losses]
        answer["peak"] = device.memory_stats()["max_allocated"]
        losses, count = [], 1
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
