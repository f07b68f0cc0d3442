"""Profile training steps on a GPU: the kernels that take most time, launches and idle time.

    python -m benchmarks.profile_gpu --shape 1.3b [--steps 5] [--ours "--no-bias-swiglu-fusion"]
    python -m benchmarks.profile_gpu --shape tiny --device cpu      (that it works, on any machine)

Idle is the share of the time from the first to the last kernel in which no kernel runs.  Copies and
fills count as kernels.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_contenders import SHAPES, make_trainer
from megatron.core import device

_MOST = 30  # kernels in the table


@dataclass(frozen=True)
class Kernel:
    """One run of a kernel; times in microseconds."""

    name: str
    start: float
    stop: float


def main() -> None:
    """Print the table of a shape, then one line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", default="124m", help=f"one of {', '.join(SHAPES)}")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--steps", type=int, default=5, help="profiled steps, after as many others")
    parser.add_argument("--ours", default="", help="further flags")
    asked = parser.parse_args()
    device.choose(asked.device)
    kernels = profiled(make_trainer("ours", SHAPES[asked.shape], asked.ours), asked.steps)
    print(f"{asked.shape}: {device.name()}, torch {torch.__version__}\n")
    print("\n".join(table_of(kernels, asked.steps)))
    print(summary_of(kernels, asked.steps))


def profiled(trainer: Any, steps: int) -> list[Kernel]:
    """Return the kernels of ``steps`` steps; on a CPU, operations stand for them."""
    for _ in range(steps):
        trainer.step()
    device.synchronize()
    is_gpu = device.is_cuda()
    # Without the host's operations, whose recording would delay launches and add idle time.
    with profile(
        activities=[ProfilerActivity.CUDA if is_gpu else ProfilerActivity.CPU]
    ) as profiler:
        for _ in range(steps):
            trainer.step()
        device.synchronize()
    wanted = DeviceType.CUDA if is_gpu else DeviceType.CPU
    return [
        Kernel(event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()
        # Ranges such as that of the optimizer's step would cover idle time.
        if event.device_type == wanted and not event.is_user_annotation
    ]


def table_of(kernels: Iterable[Kernel], steps: int) -> Iterator[str]:
    """Yield the rows of the kernels that take most time, as a Markdown table."""
    spent: dict[str, list[float]] = {}
    for kernel in kernels:
        spent.setdefault(kernel.name, []).append(kernel.stop - kernel.start)
    total = sum(map(sum, spent.values())) or 1.0
    yield "| kernel | launches a step | ms a step | share |"
    yield "|---|---|---|---|"
    for name, times in sorted(spent.items(), key=lambda item: -sum(item[1]))[:_MOST]:
        took = sum(times)
        yield (
            f"| {name[:90]} | {len(times) / steps:g} | {took / steps / 1e3:.3f} | "
            f"{took / total:.1%} |"
        )


def summary_of(kernels: Sequence[Kernel], steps: int) -> str:
    """Return launches a step, the idle share and the names of attention kernels, in one line."""
    if not kernels:
        return "no kernels were found"
    ordered = sorted(kernels, key=lambda kernel: kernel.start)
    first = ordered[0].start
    end = ordered[0].start
    busy = 0.0
    for kernel in ordered:  # overlapping kernels count once
        busy += max(0.0, kernel.stop - max(kernel.start, end))
        end = max(end, kernel.stop)
    attention = {k.name[:60] for k in kernels if "flash" in k.name or "attention" in k.name.lower()}
    return (
        f"{len(kernels) / steps:g} launches a step, idle {1 - busy / (end - first):.1%}, "
        f"attention: {', '.join(sorted(attention)) or 'none by name'}"
    )


if __name__ == "__main__":
    main()
