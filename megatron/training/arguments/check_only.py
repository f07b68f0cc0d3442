"""--check-only: what a run would do on N ranks, or every reason why it cannot.

Talks to no other process and to no GPU, reads no data; it takes the place of a dry run.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable, Iterator

from megatron.core.config.errors import ConfigError
from megatron.core.process_groups_config import make_grids
from megatron.core.rank_grid import RankGrid
from megatron.training.arguments.parameter_count import rank_parameters
from megatron.training.arguments.resolve import resolve
from megatron.training.config.run import RunConfig

_BYTES_PER_GIB = 2**30
_SHOWN_RANKS = 8


def check_only(args: Namespace, write: Callable[[str], object] = print) -> int:
    """``write`` the plan of the run, status 0; or print every conflict with its cure, status 1.

    Conflicts are printed on every rank: a launcher ends the others when the first one has failed.
    """
    world_size = args.check_world_size or int(os.environ.get("WORLD_SIZE", "1"))
    try:
        run = resolve(args, world_size)
    except ConfigError as error:
        print(error, flush=True)
        return 1
    for line in plan(run):
        write(line)
    return 0


def plan(run: RunConfig) -> Iterator[str]:
    """The lines of the report: layout, memory, batches, length, warnings."""
    yield f"this run can start on {run.world_size} ranks"
    yield ""
    yield from _layout(run)
    yield ""
    yield from _memory(run)
    yield ""
    yield from _batches(run)
    if run.warnings:
        yield ""
        yield "warnings:"
        yield from (f"  - {warning}" for warning in run.warnings)


def _layout(run: RunConfig) -> Iterator[str]:
    m = run.model
    dense, _ = make_grids(
        run.world_size,
        tp=m.tensor_model_parallel_size,
        pp=m.pipeline_model_parallel_size,
        cp=m.context_parallel_size,
        ep=m.expert_model_parallel_size,
        expt_tp=m.expert_tensor_parallel_size,
        order="tp-cp-ep-pp-dp" if run.distributed.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp",
    )
    yield "axis              ranks  groups  first group"
    for name, axes in (
        ("tensor", ("tp",)),
        ("context", ("cp",)),
        ("pipeline", ("pp",)),
        ("data", ("dp",)),
        ("one replica", ("tp", "cp", "pp")),
    ):
        yield _row(name, dense, axes)


def _row(name: str, grid: RankGrid, axes: tuple[str, ...]) -> str:
    groups = grid.groups(*axes)
    first = groups[0]
    shown = " ".join(str(rank) for rank in first[:_SHOWN_RANKS])
    more = f" ... {first[-1]}" if len(first) > _SHOWN_RANKS else ""
    return f"{name:16s} {len(first):6d} {len(groups):7d}  {shown}{more}"


def _memory(run: RunConfig) -> Iterator[str]:
    parameters, with_vocabulary = rank_parameters(run)
    half = run.model.bf16 or run.model.fp16
    grad_bytes = 4 if run.ddp.grad_reduce_in_fp32 or not half else 2
    states = 2 if run.optimizer.optimizer == "adam" else 1
    # Half precision keeps its own weights beside the fp32 main ones.
    per_parameter = (2 if half else 0) + 4 + grad_bytes + 4 * states
    without = "" if with_vocabulary else ", vocabulary not counted (--vocab-size says it)"
    yield f"parameters per rank: {parameters:,}{without}"
    yield (
        f"weights, gradients and optimizer: {per_parameter} bytes each, "
        f"{parameters * per_parameter / _BYTES_PER_GIB:.2f} GiB per rank; activations come on top"
    )


def _batches(run: RunConfig) -> Iterator[str]:
    t, v, seq = run.training, run.validation, run.data.seq_length or 0
    batch, micro, dp = t.global_batch_size or 0, t.micro_batch_size or 1, run.data_parallel_size
    micro_batches = batch // (micro * dp)
    effective = micro_batches * micro * dp
    yield (
        f"batch: {effective:,} samples a step = {dp} replicas x {micro_batches} micro-batches x "
        f"{micro} samples; {effective * seq:,} tokens a step"
    )
    if t.rampup_batch_size is not None:
        start, increment, samples = t.rampup_batch_size
        yield f"ramp-up: from {start} by {increment} until {samples:,} samples are consumed"
    if v.skip_train:
        yield "length: no training (--skip-train)"
        return
    if t.train_iters is not None:
        steps, train = t.train_iters, t.train_iters * effective
        yield f"length: {steps:,} steps, {train:,} samples, {train * seq:,} tokens"
    else:
        train = t.train_samples or 0
        steps = train // effective
        at_least = "at least " if t.rampup_batch_size is not None else ""
        yield f"length: {train:,} samples, {at_least}{steps:,} steps, {train * seq:,} tokens"
    if not v.full_validation:
        passes = steps // v.eval_interval + 1
        yield (
            f"evaluation: {passes:,} times {v.eval_iters} batches = "
            f"{passes * v.eval_iters * effective:,} samples; test {v.eval_iters * effective:,}"
        )
