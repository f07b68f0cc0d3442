"""Two processes of one thread each against one process of two threads, on two cores.

    OMP_WAIT_POLICY=passive python -m benchmarks.parallel_cpu [--dtype bf16] [--rounds 3]

Every contender is pretrain_gpt.py's own run from flags to loop, in fresh processes, on the same
batches; each must report the losses of one process.  Contenders take turns, so that a loud
neighbour disturbs all of them.  Speed is wall time, as waiting is the point; work is CPU time of
all threads, which others on the machine change least.  A last step under torch's profiler tells how
long some collective was under way (transfers are posted long before they are needed, which tells
nothing); what a rank waited for is `megatron.core.waiting`'s sum, transfers included.
Dated results are in parallel_cpu.md.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import pretrain_gpt
from megatron.core import waiting
from megatron.core.enums import ModelType
from megatron.core.tensor_parallel.layers import _start_reduction as start_reduction
from megatron.training import step
from megatron.training.runtime import Runtime
from megatron.training.state import StepResult
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
    """One step of one rank."""

    wall_s: float
    cpu_s: float
    waited_s: float  # for transfers and collectives
    under_way_s: float  # time in which a collective was; 0 where no profiler looked
    loss: float | None


class Measured:
    """`train_step` with clocks around it; the last step under the profiler."""

    def __init__(self, num_steps: int) -> None:
        self.num_steps, self.steps = num_steps, list[Step]()

    def __call__(self, run: Runtime) -> StepResult:
        is_profiled = len(self.steps) + 1 == self.num_steps
        profiler = profile(activities=[ProfilerActivity.CPU]) if is_profiled else None
        if profiler is not None:
            profiler.start()
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        waited_s = waiting.record.waited_s
        result = step.train_step(run)
        wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
        under_way_s = 0.0
        if profiler is not None:
            profiler.stop()
            spans = [e.time_range for e in profiler.events() if _is_collective(e.name)]
            under_way_s = 1e-6 * length_of_union((span.start, span.end) for span in spans)
        loss = float(result.losses["lm loss"]) if run.has_loss else None
        waited_s = waiting.record.waited_s - waited_s
        self.steps.append(Step(wall_s, cpu_s, waited_s, under_way_s, loss))
        return result


def _is_collective(event: str) -> bool:
    return event.startswith("gloo:") and event not in ("gloo:send", "gloo:recv")


def length_of_union(spans: Iterable[tuple[float, float]]) -> float:
    """Of the points that lie in any span."""
    total = reached = 0.0
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, reached))
        reached = max(reached, stop)
    return total


def _sum_at_once(*args: Any) -> tuple[None, torch.Tensor]:
    work, total = start_reduction(*args)
    work.wait()
    return None, total


def steps_of_rank(
    rank: int, world_size: int, store: str, name: str, argv: Sequence[str], num_steps: int
) -> list[Step]:
    """One whole run in this process, a fresh one."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(2 // world_size)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size
    )
    measured = Measured(num_steps)
    with (
        open(os.devnull, "w") as nowhere,
        redirect_stdout(nowhere),
        mock.patch("sys.argv", ["pretrain_gpt.py", *argv]),
        mock.patch("megatron.training.loop.train_step", measured),
        mock.patch(
            "megatron.core.tensor_parallel.layers._start_reduction",
            _sum_at_once if name == _TP_WAITS else start_reduction,
        ),
    ):
        pretrain(
            pretrain_gpt.train_valid_test_datasets_provider,
            pretrain_gpt.model_provider,
            ModelType.encoder_or_decoder,
            pretrain_gpt.forward_step,
        )
    return measured.steps


def turn(name: str, more_flags: str, num_steps: int) -> list[list[Step]]:
    """The steps of each rank of a run; the first step of all is left out."""
    world_size = 1 if name == _ONE else 2
    argv = f"{MODEL} {CONTENDERS.get(name, '')} {more_flags} --train-iters {num_steps}".split()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pretrain_gpt"])
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(world_size, context) as pool,
    ):
        store = f"{folder}/store"
        ranks = [
            pool.submit(steps_of_rank, rank, world_size, store, name, argv, num_steps)
            for rank in range(world_size)
        ]
        return [rank.result()[1:] for rank in ranks]


class Row(NamedTuple):
    """One turn of a contender, per step."""

    wall_s: list[float]
    cpu_s: list[float]  # of all ranks
    losses: list[float]
    under_way: float  # share of the step, of the rank where it is smaller
    waited: float


def row(ranks: list[list[Step]]) -> Row:
    """In the last step of every rank the profiler looked on: it is not timed."""
    *timed, last = zip(*ranks, strict=True)
    return Row(
        [max(rank.wall_s for rank in ranks) for ranks in timed],
        [sum(rank.cpu_s for rank in ranks) for ranks in timed],
        [next(rank.loss for rank in ranks if rank.loss is not None) for ranks in timed],
        min(rank.under_way_s / rank.wall_s for rank in last),
        statistics.median(min(rank.waited_s / rank.wall_s for rank in ranks) for ranks in timed),
    )


def report(rows: dict[str, list[Row]]) -> None:
    """Against one process: the best steps of all rounds, and the median of ratios in a round."""
    tokens = _SEQUENCES * _TOKENS
    print("| | tokens/s | speed | (median) | work | (median) | under way | waited | losses |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, turns in rows.items():
        (wall_s, speed), (cpu_s, work) = (
            compared([getattr(t, field) for t in turns], [getattr(t, field) for t in rows[_ONE]])
            for field in ("wall_s", "cpu_s")
        )
        one = min(min(t.wall_s) for t in rows[_ONE]), min(min(t.cpu_s) for t in rows[_ONE])
        pairs = zip(rows[_ONE][0].losses, turns[0].losses, strict=True)
        cells = [
            f"{tokens / wall_s:.0f}",
            f"{one[0] / wall_s:.2f}",
            f"{1 / speed:.2f}",
            f"{cpu_s / one[1]:.2f}",
            f"{work:.2f}",
            f"{100 * statistics.median(t.under_way for t in turns):.0f} %",
            f"{100 * statistics.median(t.waited for t in turns):.0f} %",
            f"{max(abs(a - b) / a for a, b in pairs):.0e}",
        ]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def compared(times: list[list[float]], ones: list[list[float]]) -> tuple[float, float]:
    """The best of all, and the median over rounds of the ratio of medians."""
    ratios = [
        statistics.median(mine) / statistics.median(one)
        for mine, one in zip(times, ones, strict=True)
    ]
    return min(min(mine) for mine in times), statistics.median(ratios)


def main() -> None:
    """Print the table of parallel_cpu.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5, help="of a turn; the first is not counted")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    args = parser.parse_args()
    dtype = "--bf16" if args.dtype == "bf16" else ""
    rows: dict[str, list[Row]] = {name: [] for name in (_ONE, *args.contenders)}
    loads = []
    for _ in range(args.rounds):
        for name, turns in rows.items():
            turns.append(row(turn(name, dtype, args.steps)))
            loads.append(os.getloadavg()[0])
        print(f"\nload {min(loads):.1f} to {max(loads):.1f}, median {statistics.median(loads):.1f}")
        report(rows)


if __name__ == "__main__":
    main()
