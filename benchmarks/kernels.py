"""Compare each fused kernel with torch's operations and with memory bandwidth.

    python -m benchmarks.kernels [--rounds 15] [--only glu] [--device cpu]

A case calls a public function twice: with the kernels of this device enabled, and without.
Contenders alternate; results are medians, on a CPU of CPU time of one thread, on a GPU of the time
between events.  The floor copies as many bytes as the work has to read and write, each counted
once; for work in place it is an addition in place, which is faster.  On a CPU, caches hold what the
previous contender left; on a GPU they hold 256 MiB of something else.  On a GPU a pause of the
device precedes each work, longer than the host needs to queue it, so that the time is that of
kernels and not of Python.  A case that fails is a row too.  Dated results are in kernels.md.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from unittest import mock

import torch
from torch import Tensor

from benchmarks import kernel_cases, kernel_cases_gpu
from benchmarks.kernel_cases import Case
from megatron.core import device
from megatron.core.device import cpu_kernels, cpu_tuning
from megatron.core.fusions import kernels
from megatron.core.optional import require, why_missing

_PAUSE_S = 0.01
_LONGEST_PAUSE_S = 0.5
_MOST_CYCLES_PER_S = 2.1e9  # no GPU has a faster clock
_FLUSHED_BYTES = 2**28  # several times the cache of any GPU
_HAS_TRITON = why_missing("triton") is None
_TRITON = (require("triton.errors", "its kernels").TritonError,) if _HAS_TRITON else ()
_FAILURES = (RuntimeError, ValueError, TypeError, AttributeError, AssertionError, *_TRITON)


def kernels_off() -> AbstractContextManager[object]:
    """Disable the kernels within the context: public functions use torch's operations."""
    if device.is_cuda():
        return mock.patch.object(kernels, "find", return_value=None)
    return mock.patch.object(cpu_kernels, "take", return_value=False)


@dataclass(frozen=True)
class Row:
    """Median times of one case, in milliseconds."""

    name: str
    num_bytes: int
    torch_ms: float
    fused_ms: float
    copy_ms: float

    def __str__(self) -> str:
        speed = self.num_bytes / self.fused_ms / 1e6
        return (
            f"| {self.name} | {self.num_bytes / 2**20:.0f} | {self.torch_ms:.2f} | "
            f"{self.fused_ms:.2f} | {self.torch_ms / self.fused_ms:.2f} | {speed:.1f} | "
            f"{self.copy_ms / self.fused_ms:.2f} |"
        )


@functools.cache
def _flushed() -> Tensor:
    return torch.empty(_FLUSHED_BYTES, dtype=torch.int8, device=device.current())


def pause(seconds: float) -> None:
    """Queue a pause of at least ``seconds`` on the GPU; the host goes on."""
    torch.cuda._sleep(int(seconds * _MOST_CYCLES_PER_S))


def time_of(work: Callable[[], object], prepare: Callable[[], object]) -> float:
    """Return the milliseconds of one call after ``prepare``: CPU time, or time on the GPU."""
    pause_s = _PAUSE_S
    while device.is_cuda():
        prepare()
        _flushed().zero_()
        device.synchronize()
        queued_at_s = time.perf_counter()
        pause(pause_s)
        begin = device.moment()
        work()
        end = device.moment()
        host_s = time.perf_counter() - queued_at_s
        device.synchronize()
        # Work that waits for the device itself outlasts every pause.
        if host_s < pause_s or pause_s > _LONGEST_PAUSE_S:
            return 1e3 * device.seconds_between(begin, end)
        pause_s *= 4
    prepare()
    started_at_s = time.process_time()
    work()
    return 1e3 * (time.process_time() - started_at_s)


def measured(case: Case, rounds: int) -> Row:
    """Time the contenders of one case alternately, after one warmup round."""
    source = torch.rand(case.num_bytes // 8, device=device.current())  # zeros may be faster
    target = torch.ones_like(source)
    floor = partial(target.add_, 1) if case.in_place else partial(target.copy_, source)
    seen: dict[str, list[float]] = {"torch": [], "fused": [], "copy": []}
    for turn in range(rounds + 1):
        for name, times in seen.items():
            with kernels_off() if name == "torch" else nullcontext():
                found = time_of(floor if name == "copy" else case.work, case.prepare)
            if turn:
                times.append(found)
    torch_ms, fused_ms, copy_ms = (statistics.median(times) for times in seen.values())
    return Row(case.name, case.num_bytes, torch_ms, fused_ms, copy_ms)


def rows(rounds: int, only: str) -> Iterator[Row | str]:
    """Yield the rows of all cases of this device whose names contain ``only``."""
    for make in (kernel_cases_gpu if device.is_cuda() else kernel_cases).CASES:
        name = str(make)
        try:
            case = make()
            name = case.name
            if only in name:
                yield measured(case, rounds)
        except _FAILURES as error:
            traceback.print_exc()
            message = str(error).replace("|", "/").partition("\n")[0][:100]
            yield f"| {name} | failed: {type(error).__name__} {message} | | | | | |"


def main() -> None:
    """Print the rows of kernels.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="", help="part of the names of cases")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    args = parser.parse_args()
    device.choose(args.device, 0)
    torch.set_num_threads(1)
    cpu_tuning.keep_freed_memory()
    print("| work | MiB | torch ms | fused ms | torch / fused | GB/s | of the floor |")
    print("|---|---|---|---|---|---|---|")
    failed = measured_rows = 0
    for row in rows(args.rounds, args.only):
        print(row, flush=True)
        measured_rows += 1
        failed += isinstance(row, str)
    print(f"\n{measured_rows} rows, {failed} failed; {device.name()}, torch {torch.__version__}")
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
