"""Compare two processes of one thread each with one process of two threads, on two cores.

    OMP_WAIT_POLICY=passive python -m benchmarks.parallel_cpu [--dtype bf16] [--rounds 10]

Every contender is a complete run of pretrain_gpt.py, from flags to loop, in its own processes, on
the same batches; each must report the losses of one process.  They alternate step by step, so that
other load on the machine disturbs all of them equally.  Speed is wall time, because waiting is part
of it; work is CPU time of all threads, which other load changes least.  torch's profiler measures,
in one more step, how long a collective was in progress (without send and receive, which are posted
long before their data is needed).  The time that a rank waited is `collective_tracer`'s sum, which
includes send and receive.  Dated results are in parallel_cpu.md.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import redirect_stdout
from multiprocessing.connection import Connection
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import pretrain_gpt
from megatron.core.diagnostics import collective_tracer
from megatron.core.enums import ModelType
from megatron.core.tensor_parallel.linear import start_reduction
from megatron.training.runtime.context import StepResult
from megatron.training.step import train_step
from megatron.training.step.run import TrainingRun
from megatron.training.training import pretrain

_LAYERS, _SEQUENCES, _TOKENS = 4, 4, 512
MODEL = (
    f"--device cpu --num-layers {_LAYERS} --hidden-size 384 --num-attention-heads 6 "
    f"--seq-length {_TOKENS} --max-position-embeddings {_TOKENS} --micro-batch-size 1 "
    f"--global-batch-size {_SEQUENCES} --lr 3e-4 --lr-decay-style constant --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 8191 --hidden-dropout 0 --attention-dropout 0 "
    "--eval-iters 0 --num-workers 0 --no-create-attention-mask-in-dataloader"
)
_ONE, _TP_WAITS = "one process", "TP, sums waited for"
_ZERO = "--use-distributed-optimizer --ddp-num-buckets 5"
_TP, _PP, _CP = (
    f"--{axis}-parallel-size 2" for axis in ("tensor-model", "pipeline-model", "context")
)
CONTENDERS = {
    "DP": "--ddp-num-buckets 5",
    "DP, overlap": "--ddp-num-buckets 5 --overlap-grad-reduce",
    "ZeRO-1": _ZERO,
    "ZeRO-1, overlap": f"{_ZERO} --overlap-grad-reduce --overlap-param-gather",
    "FSDP2": "--use-torch-fsdp2",
    "TP": _TP,
    _TP_WAITS: _TP,
    "TP + SP": f"{_TP} --sequence-parallel",
    "PP, 1f1b": _PP,
    "PP, interleaved": f"{_PP} --num-virtual-stages-per-pipeline-rank 2",
    "PP, zb-h1": f"{_PP} --pipeline-schedule zb-h1",
    "PP, zb-v": f"{_PP} --pipeline-schedule zb-v --num-virtual-stages-per-pipeline-rank 2",
    "CP, p2p": _CP,
    "CP, a2a": f"{_CP} --cp-comm-type a2a",
    "CP, allgather": f"{_CP} --cp-comm-type allgather",
}


class Step(NamedTuple):
    """Measurements of one step on one rank."""

    wall_s: float
    cpu_s: float
    waited_s: float  # for transfers and collectives
    under_way_s: float  # time with a collective in progress; 0 without profiler
    loss: float | None


class Measured:
    """Timed `train_step`: each step waits for a request, which says whether to profile it."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe

    def __call__(self, run: TrainingRun) -> StepResult:
        is_profiled = self.pipe.recv()
        profiler = profile(activities=[ProfilerActivity.CPU]) if is_profiled else None
        if profiler is not None:
            profiler.start()
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        waited_s = collective_tracer.record.waited_s
        result = train_step.train_step(run)
        wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
        under_way_s = 0.0
        if profiler is not None:
            profiler.stop()
            spans = [e.time_range for e in profiler.events() if _is_collective(e.name)]
            under_way_s = 1e-6 * length_of_union((span.start, span.end) for span in spans)
        loss = float(result.losses["lm loss"]) if run.has_loss else None
        waited_s = collective_tracer.record.waited_s - waited_s
        self.pipe.send(Step(wall_s, cpu_s, waited_s, under_way_s, loss))
        return result


def _is_collective(event: str) -> bool:
    return event.startswith("gloo:") and event not in ("gloo:send", "gloo:recv")


def length_of_union(spans: Iterable[tuple[float, float]]) -> float:
    """Return the total length that the spans cover."""
    total = reached = 0.0
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, reached))
        reached = max(reached, stop)
    return total


def _sum_at_once(*args: Any) -> tuple[None, torch.Tensor]:
    work, total = start_reduction(*args)
    work.wait()
    return None, total


def serve(
    rank: int, world_size: int, store: str, name: str, argv: Sequence[str], pipe: Connection
) -> None:
    """Run one rank in this new process; each step waits until it is requested."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(2 // world_size)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size
    )
    with (
        open(os.devnull, "w") as nowhere,
        redirect_stdout(nowhere),
        mock.patch("sys.argv", ["pretrain_gpt.py", *argv]),
        mock.patch("megatron.training.step.train_step.train_step", Measured(pipe)),
        mock.patch(
            "megatron.core.tensor_parallel.linear.start_reduction",
            _sum_at_once if name == _TP_WAITS else start_reduction,
        ),
    ):
        pretrain(
            pretrain_gpt.train_valid_test_datasets_provider,
            pretrain_gpt.model_provider,
            ModelType.encoder_or_decoder,
            pretrain_gpt.forward_step,
        )


class Contender:
    """Ranks of one run, and the measurements of its steps."""

    def __init__(self, name: str, more_flags: str, num_steps: int, folder: str) -> None:
        world_size = 1 if name == _ONE else 2
        argv = f"{MODEL} {CONTENDERS.get(name, '')} {more_flags} --train-iters {num_steps}".split()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["pretrain_gpt"])
        self.pipes, self.processes = [], []
        store = f"{folder}/{name}"
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            arguments = (rank, world_size, store, name, argv, theirs)
            process = context.Process(target=serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)
        self.first = self.step()  # warmup
        self.timed: list[list[Step]] = []  # per round, the steps of all ranks

    def step(self, *, is_profiled: bool = False) -> list[Step]:
        """Run one step on all ranks."""
        for pipe in self.pipes:
            pipe.send(is_profiled)
        return [pipe.recv() for pipe in self.pipes]

    def wall_s(self) -> list[float]:
        return [max(rank.wall_s for rank in ranks) for ranks in self.timed]

    def cpu_s(self) -> list[float]:
        """Return for each round the CPU time of all ranks."""
        return [sum(rank.cpu_s for rank in ranks) for ranks in self.timed]

    def losses(self) -> list[float]:
        steps = [self.first, *self.timed]
        return [next(r.loss for r in ranks if r.loss is not None) for ranks in steps]

    def row(self, one: Contender) -> str:
        """Return a row of the table: best of all rounds, and median of the ratios per round."""
        walls, cpus = self.wall_s(), self.cpu_s()
        speeds = [a / b for a, b in zip(one.wall_s(), walls, strict=True)]
        works = [a / b for a, b in zip(cpus, one.cpu_s(), strict=True)]
        waited = [min(rank.waited_s / rank.wall_s for rank in ranks) for ranks in self.timed]
        under_way = min(r.under_way_s / r.wall_s for r in self.step(is_profiled=True))
        gaps = [abs(a - b) / a for a, b in zip(one.losses(), self.losses(), strict=True)]
        cells = [
            f"{_SEQUENCES * _TOKENS / min(walls):.0f}",
            f"{min(one.wall_s()) / min(walls):.2f}",
            f"{statistics.median(speeds):.2f}",
            f"{min(cpus) / min(one.cpu_s()):.2f}",
            f"{statistics.median(works):.2f}",
            f"{100 * under_way:.0f} %",
            f"{100 * statistics.median(waited):.0f} %",
            f"{max(gaps):.0e}",
        ]
        return " | ".join(cells)


def main() -> None:
    """Print the table of parallel_cpu.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--rounds", type=int, default=10, help="steps of each contender, in turns")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    args = parser.parse_args()
    dtype = "--bf16" if args.dtype == "bf16" else ""
    loads = []
    with tempfile.TemporaryDirectory() as folder:
        names = [_ONE, *args.contenders]
        runs = {name: Contender(name, dtype, args.rounds + 2, folder) for name in names}
        for _ in range(args.rounds):
            for run in runs.values():
                run.timed.append(run.step())
                loads.append(os.getloadavg()[0])
        print(f"load {min(loads):.1f} to {max(loads):.1f}, median {statistics.median(loads):.1f}\n")
        print("| | tokens/s | speed | (median) | work | (median) | under way | waited | losses |")
        print("|---|---|---|---|---|---|---|---|---|")
        for name, run in runs.items():
            print(f"| {name} | {run.row(runs[_ONE])} |", flush=True)
            for process in run.processes:  # they still use the folder
                process.join()


if __name__ == "__main__":
    main()
