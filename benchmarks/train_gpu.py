"""Measure training speed and memory on one GPU, against peers and a large matmul.

    python -m benchmarks.train_gpu --shape 1.3b [--rounds 5] [--steps 10] [--output rows.jsonl]
    python -m benchmarks.train_gpu --device cpu --tiny       (that it works, on any machine)

Each contender runs in a process of its own, which starts when the one before has ended: it has the
device alone.  A step accumulates the gradients of eight micro-batches, whose tokens lie in
page-locked memory.  A turn of steps is timed as a whole, with a synchronization of the device at
its end; the result is the median of turns.  TFLOP/s count the forward pass once and the backward
pass twice, attention without its masked half, and no recomputation.  Peak memory is that of the
allocator (on a CPU, of the process).  The row of a contender is void if its losses differ by more
than 0.5 % from ours in bf16 (1 % for fp8).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks import gpu_contenders
from benchmarks.gpu_contenders import SHAPES, Shape, contenders, make_trainer
from megatron.core import device
from megatron.training.arguments.parser import parse_args
from megatron.training.arguments.resolve import resolve
from megatron.training.estimates.flops import causal_model_flops
from megatron.training.estimates.parameter_count import known_padded_vocab_size
from megatron.training.estimates.peak_flops import known_peak
from megatron.training.memory.report import is_lack_of_memory

COMPARED_STEPS = 20
_GIB = 2**30
Found = dict[str, Any]


def main() -> None:
    """Measure and print."""
    asked = _arguments()
    if asked.worker is not None:
        serve(asked)
        return
    device.choose(asked.device)
    for name in ("tiny", "tiny-llama", "tiny-moe") if asked.tiny else asked.shape.split(","):
        shape = SHAPES[name]
        names = asked.contenders.split(",") if asked.contenders else contenders(shape)
        rows = table(shape, measure(asked, shape, ["product", *names]))
        print("\n".join(rows), flush=True)


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
    parser.add_argument("--output", default=None, help="append what was found as JSON")
    parser.add_argument("--worker", default=None, help=argparse.SUPPRESS)
    return parser.parse_args()


# -- the parent --------------------------------------------------------------------------------


def measure(asked: argparse.Namespace, shape: Shape, names: list[str]) -> dict[str, Found]:
    """Return per contender the seconds per step of each turn, its losses and its peak memory."""
    found = {}
    for name in names:
        worker = Worker(asked, shape, name)
        for _ in range(asked.rounds):
            worker.turn()
        worker.stop()
        found[name] = worker.found
        if asked.output is not None:  # at once: a lease may end before the last contender
            row = {"shape": shape.name, "device": device.name(), name: worker.found}
            with open(asked.output, "a") as file:
                file.write(json.dumps(row) + "\n")
    return found


class Worker:
    """Contender in its own process, which starts with its first turn."""

    def __init__(self, asked: argparse.Namespace, shape: Shape, name: str) -> None:
        self.name, self.found = name, {"step_s": [], "losses": [], "peak": 0.0, "failed": None}
        self._command = [
            *(sys.executable, "-m", "benchmarks.train_gpu", "--worker", name),
            *("--shape", shape.name, "--device", asked.device, "--ours", asked.ours),
            *("--steps", str(asked.steps), "--warmup", str(asked.warmup)),
        ]
        self._process: subprocess.Popen[str] | None = None

    def turn(self) -> None:
        """Run one turn of steps; do nothing after a failure."""
        if self.found["failed"] is not None:
            return
        if self._process is None:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("turn\n")
        self._process.stdin.flush()
        answers = (json.loads(x) for x in self._process.stdout if x.startswith('{"step_s"'))
        answer = next(answers, {"failed": "ended", "step_s": [], "losses": [], "peak": 0.0})
        self.found["step_s"] += answer["step_s"]
        self.found["losses"] = self.found["losses"] or answer["losses"]
        self.found["peak"] = max(self.found["peak"], answer["peak"])
        self.found["failed"] = answer["failed"]

    def stop(self) -> None:
        """End the process."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait()
            self._process = None


def flops_of_step(shape: Shape) -> float:
    """Return the FLOPs of a step, by the function that the log's MFU uses."""
    config = resolve(parse_args(argv=gpu_contenders.flags(shape, "ours")), 1)
    padded = known_padded_vocab_size(config)
    assert padded is not None
    return causal_model_flops(config, shape.rows, padded).total


def table(shape: Shape, found: dict[str, Found]) -> Iterator[str]:
    """Return the table, one row per contender."""
    products = found.pop("product")
    product = max(products["losses"], default=math.nan)
    peak = known_peak(device.name()) or math.nan
    flops = flops_of_step(shape)
    tokens = shape.rows * shape.seq
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
    reference = found.get("ours", {"losses": [], "step_s": []})
    for name, one in found.items():
        if not one["step_s"]:
            yield f"| {name} | {one['failed']} | | | | | | |"
            continue
        step_s = statistics.median(one["step_s"])
        rate = flops / step_s
        ratio = step_s / statistics.median(reference["step_s"] or [math.nan])
        gap = loss_gap(reference["losses"], one["losses"])
        is_void = gap > (0.01 if "fp8" in name else 0.005)
        yield (
            f"| {name} | {tokens / step_s:,.0f} | {rate / 1e12:.4g} | {rate / peak:.1%} | "
            f"{rate / product:.1%} | {ratio:.3f} | {one['peak'] / _GIB:.2f} | "
            f"{gap:.3%}{' VOID' if is_void else ''} |"
        )


def loss_gap(ours: list[float], theirs: list[float]) -> float:
    """Return the largest relative difference over the first steps."""
    pairs = list(zip(ours, theirs, strict=False))[:COMPARED_STEPS]
    return max((abs(a - b) / abs(a) for a, b in pairs), default=math.nan)


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
