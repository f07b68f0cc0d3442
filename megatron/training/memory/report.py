"""Out-of-memory report: the failed allocation, the largest owners of memory, suggested flags.

An allocation that fails on the GPU or the CPU ends the run on all ranks with `OutOfMemory`.  Before
that this module costs nothing, and it does not communicate.
"""

from __future__ import annotations

import contextlib
import os
import re
import traceback
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator
from types import TracebackType

from megatron.core import device, virtual_ranks
from megatron.core.config.errors import MegatronError, OutOfMemory
from megatron.training import plan
from megatron.training.arguments.resolve import resolve
from megatron.training.estimates.loss_chunks import logits_bytes
from megatron.training.memory.breakdown import ACTIVATIONS, LOGITS, OPTIMIZER, Owner, owners
from megatron.training.process.phase import current_phase
from megatron.training.process.rank_print import rank, ranks_here
from megatron.training.runtime.context import RunContext

_GIB = 2**30
_SHOWN = 10
_SIGNS = ("can't allocate memory", "not enough memory", "out of memory", "bad_alloc")
_ASKED = re.compile(r"(?:[Tt]ried|Unable) to allocate ([\d.]+) (\w+)")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": _GIB, "TiB": 2**40}


@contextlib.contextmanager
def report_oom(current_run: Callable[[], RunContext | None]) -> Iterator[None]:
    """Turn an allocation that fails in this context into OutOfMemory; its message is the report.

    ``current_run`` returns the run that fails, None before its start.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        run = current_run()
        if isinstance(error, OutOfMemory) or not is_lack_of_memory(error) or run is None:
            raise
        trace = error.__traceback__
        head = list(_circumstances(run, error))
        held = owners(run)
        traceback.clear_frames(trace)  # frees the activations: the report needs memory
        device.empty_cache()
        text = "\n".join([*head, *_largest(held), *_planned(run), *_cures(run, held)])
        raise OutOfMemory(text) from None


def is_lack_of_memory(error: BaseException) -> bool:
    """Return whether ``error`` is a failed allocation of torch, numpy, NCCL or C++."""
    return isinstance(error, MemoryError) or any(sign in str(error) for sign in _SIGNS)


def asked_bytes(error: BaseException) -> int | None:
    """Return the bytes of the failed allocation, None if the error does not state them."""
    found = _ASKED.search(str(error))
    if found is None or found[2] not in _UNITS:
        return None
    return int(float(found[1]) * _UNITS[found[2]])


def _circumstances(run: RunContext, error: BaseException) -> Iterator[str]:
    asked = asked_bytes(error)
    size = "an allocation" if asked is None else f"an allocation of {asked / _GIB:.3f} GiB"
    yield (
        f"rank {rank()} is out of memory in step {run.state.iteration + 1}, {current_phase()}: "
        f"{size} failed"
    )
    own = [place for place in _places(error.__traceback__) if "megatron" in place]
    if own:
        yield f"  at {own[-1]}"
    stats, total = device.memory_stats(), _memory()
    in_pieces = stats["reserved"] - stats["allocated"]
    yield (
        f"  {device.name()}: {stats['allocated'] / _GIB:.3f} GiB in use (most so far "
        f"{stats['max_allocated'] / _GIB:.3f}), "
        + (f"{in_pieces / _GIB:.3f} GiB free in pieces, " if in_pieces else "")
        + f"of {total / _GIB:.3f} GiB for this rank"
    )


def _places(trace: TracebackType | None) -> Iterator[str]:
    """Yield file, line and name of each function in the traceback, the innermost last."""
    for frame, line in traceback.walk_tb(trace):
        yield f"{os.path.relpath(frame.f_code.co_filename)}:{line} {frame.f_code.co_name}"


def _largest(held: list[Owner]) -> Iterator[str]:
    yield f"what holds most, GiB (of {sum(o.num_bytes for o in held) / _GIB:.3f} in tensors):"
    for owner in held[:_SHOWN]:
        of = f" of {owner.name}" if owner.name else ""
        yield f"  {owner.num_bytes / _GIB:9.3f}  {owner.kind}{of} ({owner.num_tensors})"
    rest = sum(owner.num_bytes for owner in held[_SHOWN:])
    yield f"  {rest / _GIB:9.3f}  everything else"


def _planned(run: RunContext) -> Iterator[str]:
    """Yield the planner's estimate for this rank's stage."""
    yield "what was planned, GiB of tensors (as --check-only):"
    asked = Namespace(**run.config.asked, yaml_cfg=None)
    try:
        with virtual_ranks.without_groups():
            config = resolve(asked, run.config.world_size, trains=run.config.trains)
            only = run.groups.pp.rank()
            planned = plan.plan_run(config, rank(), only=only, memory=_memory())
    except (MemoryError, RuntimeError, MegatronError) as error:
        yield f"  no answer: {error}"
        return
    (stage,) = planned.stages
    state = stage.cost.state
    for name, size in (
        ("parameters", state.parameters),
        ("gradients", state.gradients),
        ("optimizer", state.optimizer),
        ("activations", stage.activations),
        ("in all", stage.peak),
    ):
        yield f"  {size / _GIB:9.3f}  {name}"


def _memory() -> int:
    return device.total_memory(ranks_here())


def _cures(run: RunContext, held: list[Owner]) -> Iterator[str]:
    """Yield flags that are not set yet and about how much they save, the cheapest in time first."""
    sizes: Counter[str] = Counter()
    for owner in held:
        if owner.name != LOGITS:
            sizes[owner.kind] += owner.num_bytes
    yield "what would help, the cheapest first (about so many GiB of what is listed above):"
    for flags, saving in _savings(run, sizes):
        yield f"  {saving / _GIB:9.3f}  {flags}" if saving else f"             {flags}"


def _savings(run: RunContext, sizes: Counter[str]) -> Iterator[tuple[str, float]]:
    """Yield flags and the bytes they save, 0 if not known; ``sizes`` has the bytes per kind.

    Formulas of docs/recompute.md: of a layer with fused attention that keeps all activations,
    selective recomputation of the MLP and the norms keeps a half, full recomputation a tenth.
    """
    m, o, batch = run.config.model, run.config.optimizer, run.config.training.micro_batch_size
    activations, optimizer = sizes[ACTIVATIONS], sizes[OPTIMIZER]
    logits = logits_bytes(run.config, run.padded_vocab_size) if run.has_loss else 0
    replicas = run.config.data_parallel_size
    if logits and not m.loss_chunk_size:
        yield "--loss-chunk-size 1024", logits
    if m.tensor_model_parallel_size > 1 and not m.sequence_parallel:
        yield "--sequence-parallel", activations * (1 - 1 / m.tensor_model_parallel_size) / 2
    if replicas > 1 and not o.use_distributed_optimizer:
        yield "--use-distributed-optimizer", optimizer * (1 - 1 / replicas)
    if not o.use_precision_aware_optimizer and (m.bf16 or m.fp16):
        flags = "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
        yield flags, optimizer / 2
    if m.recompute_granularity is None:
        yield "--recompute-granularity adaptive (as little as fits)", activations * 0.9
        flags = "--recompute-granularity selective --recompute-modules mlp layernorm"
        yield flags, activations / 2
    if batch > 1:
        yield f"--micro-batch-size {batch // 2}", (activations + logits) / 2
    if m.recompute_granularity != "full":
        flags = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
        yield flags, activations * 0.9
    if not o.optimizer_cpu_offload and device.host_is_apart():
        yield "--optimizer-cpu-offload", optimizer
    yield "more --tensor-model-parallel-size or --pipeline-model-parallel-size", 0
