"""--check-only: print what a run would do on N ranks, or every reason why it cannot start.

Uses no other process and no GPU, reads no data; it replaces a dry run.  Memory, communication and
bubble are those of `megatron.training.planning`.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from megatron.core.config.errors import ConfigError, MissingDependency
from megatron.core.extensions.transformer_engine.engine import unsupported_reason
from megatron.training.arguments.input_files import missing_files, vocabulary_of
from megatron.training.arguments.resolve import resolve
from megatron.training.config.run import RunConfig
from megatron.training.planning.out_of_memory import changes, flags_of
from megatron.training.planning.run_plan import RunPlan, plan_lines, plan_run
from megatron.training.process.rank_print import is_rank0, print_rank_0
from megatron.training.process.rank_print import world_size as world_size_of_launcher
from megatron.training.runtime.setup import grids_of

_BYTES_PER_GIB = 2**30
_SHOWN_RANKS = 8


def check_only(
    args: Namespace,
    write: Callable[[str], object] = print_rank_0,
    *,
    problems: Sequence[str] = (),
    trains: bool = True,
) -> int:
    """Pass the lines of the report to ``write``; return the exit status.

    Status 0: the run can start and fits; the lines are its plan.  Status 2: it cannot start, and
    the lines list every conflict with a suggested fix; or it exceeds --check-device-memory-gib, and
    they also report the cheapest change with which it fits.  Missing files are reported in either
    case and do not change the status.  ``problems`` are conflicts that were found before.
    ``trains``: see RunConfig.
    """
    missing = missing_files(args)
    try:
        world_size = args.check_world_size or world_size_of_launcher()
        run = resolve(args, world_size, problems=problems, trains=trains)
        if not 0 <= args.check_rank < world_size:
            raise ConfigError(f"--check-rank {args.check_rank}: ranks are 0 to {world_size - 1}")
        if not is_rank0():  # rank 0 alone plans
            return 0
        vocabulary = vocabulary_of(run.tokenizer)
        run = replace(run, tokenizer=replace(run.tokenizer, vocab_size=vocabulary.size))
        limit = args.check_device_memory_gib
        memory = None if limit is None else limit * _BYTES_PER_GIB
        planned = plan_run(run, args.check_rank, memory=memory)
    except (ConfigError, MissingDependency) as error:
        write(str(error))
        for line in _noted("missing files", missing):
            write(line)
        return error.exit_code
    fullest = planned.fullest
    has_room = memory is None or fullest.peak <= memory
    need = f"rank {fullest.rank} needs {fullest.peak / _BYTES_PER_GIB:.2f} GiB"
    notes = [vocabulary.note] if vocabulary.note else []
    if has_room:
        write(f"this run can start on {run.world_size} ranks")
        device = "; give --check-device-memory-gib to compare it with a device"
        if limit is not None:
            device = f" and fits --check-device-memory-gib {limit:g}"
        write(f"memory: {need}{device}")
    else:
        write(f"this run does not fit --check-device-memory-gib {limit:g}: {need}")
    for line in report(run, planned, [*notes, *missing]):
        write(line)
    if memory is None or has_room:
        return 0
    write("")
    for line in _suggest_fix(args, run, planned.number_of_fullest, memory):
        write(line)
    return ConfigError.exit_code


def _suggest_fix(args: Namespace, config: RunConfig, fullest: int, limit: float) -> Iterator[str]:
    """Yield the first change that no rule refuses and that fits ``limit`` bytes, else all of them.

    Each is planned as the run was: stage ``fullest`` first, the others only if that one fits.
    """
    tried = []
    for values in changes(config):
        try:
            given = Namespace(**{**vars(args), **values})
            changed = resolve(given, config.world_size, trains=config.trains)
        except ConfigError:
            continue
        changed = replace(changed, tokenizer=config.tokenizer)  # whose vocabulary is known
        plan = plan_run(changed, args.check_rank, only=fullest, memory=limit)
        if plan.fullest.peak <= limit:
            plan = plan_run(changed, args.check_rank, memory=limit)
        flags, size = flags_of(values), f"{plan.fullest.peak / _BYTES_PER_GIB:.2f} GiB"
        if plan.fullest.peak <= limit:
            yield f"cheapest change: {flags}, {size}"
            return
        tried.append(f"  {flags}: {size}")
    yield "no single change is enough:"
    yield from tried


def report(config: RunConfig, planned: RunPlan, notes: Sequence[str] = ()) -> Iterator[str]:
    """Yield the lines of the report: layout, memory, communication, batch, warnings.

    ``notes`` are further warnings.
    """
    yield ""
    yield from _layout(config)
    yield ""
    yield from plan_lines(planned)
    yield ""
    yield _batches(config)
    warnings = [*config.warnings, *notes]
    if config.model.require_transformer_engine and (reason := unsupported_reason()) is not None:
        warnings.append(f"--require-transformer-engine: this machine cannot start it: {reason}")
    yield from _noted("warnings", warnings)


def _noted(title: str, lines: Sequence[str]) -> Iterator[str]:
    if lines:
        yield ""
        yield f"{title}:"
        yield from (f"  - {line}" for line in lines)


def _layout(config: RunConfig) -> Iterator[str]:
    dense, _ = grids_of(config)
    yield "axis              ranks  groups  first group"
    for name, axes in (
        ("tensor", ("tp",)),
        ("context", ("cp",)),
        ("pipeline", ("pp",)),
        ("data", ("dp",)),
        ("one replica", ("tp", "cp", "pp")),
    ):
        groups = dense.groups(*axes)
        first = groups[0]
        shown = " ".join(str(rank) for rank in first[:_SHOWN_RANKS])
        more = f" ... {first[-1]}" if len(first) > _SHOWN_RANKS else ""
        yield f"{name:16s} {len(first):6d} {len(groups):7d}  {shown}{more}"


def _batches(config: RunConfig) -> str:
    micro = config.training.micro_batch_size
    dp = config.data_parallel_size
    micro_batches = config.training.global_batch_size // (micro * dp)
    samples = micro_batches * micro * dp
    return (
        f"batch: {samples:,} samples a step = {dp} replicas x {micro_batches} micro-batches x "
        f"{micro} samples; {samples * config.data.seq_length:,} tokens a step"
    )
