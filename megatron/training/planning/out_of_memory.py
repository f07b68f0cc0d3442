"""Out-of-memory report: the failed allocation, the largest owners of memory, suggested flags.

An allocation that fails on the GPU or the CPU ends the run on all ranks with `OutOfMemory`.  Before
that this module costs nothing, and it does not communicate.

In the list of owners each storage counts once, for its first owner: a parameter, a gradient buffer,
the optimizer, what autograd saved for backward (named by the module whose backward reads it), any
other tensor.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import traceback
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import NamedTuple

from torch import Tensor, nn
from torch.autograd.graph import Node

from megatron.core import device, virtual_ranks
from megatron.core.config.errors import MegatronError, OutOfMemory
from megatron.core.params.param_info import local_part
from megatron.core.peft.lora import stored_tensors
from megatron.training import planning
from megatron.training.arguments.resolve import resolve
from megatron.training.estimates.automatic_settings import logits_bytes
from megatron.training.process.phase import current_phase
from megatron.training.process.rank_print import rank, ranks_here
from megatron.training.runtime.context import RunContext
from megatron.training.step.run import ModelRun, TrainingRun

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
        text = "\n".join([*head, *_largest(held), *_planned(run), *_suggested_fixes(run, held)])
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
            planned = planning.plan_run(config, rank(), only=only, memory=_memory())
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


def _suggested_fixes(run: RunContext, held: list[Owner]) -> Iterator[str]:
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


ACTIVATIONS, GRADIENTS, OPTIMIZER = "activations", "gradients", "optimizer"
LOGITS = "logits of the loss"
_VIEWS = ("TBackward0", "TransposeBackward0", "ViewBackward0")
_LOSSES = ("_LinearCrossEntropy", "_VocabParallelCrossEntropy")


class Owner(NamedTuple):
    """The ``kind`` and ``name`` of what holds ``num_bytes`` in ``num_tensors`` tensors."""

    kind: str
    name: str
    num_bytes: int
    num_tensors: int


def owners(run: RunContext) -> list[Owner]:
    """Return the owners of device memory on this rank, the largest first."""
    ledger = _Ledger()
    chunks = run.model_chunks if isinstance(run, ModelRun) else []
    for name, param in _named_parameters(chunks):
        ledger.add("parameters", _pattern(name), param)
        if (stored := getattr(param, "gathered_codes", None)) is not None:
            ledger.add("parameters", "weights stored in 8 bits", stored.scaled.codes)
    for chunk in chunks:
        for tensor in stored_tensors(chunk):
            ledger.add("parameters", f"frozen weights in {tensor.dtype}", tensor)
        for buffer in getattr(chunk, "grad_buffers", {}).values():
            ledger.add(GRADIENTS, f"buffers in {buffer.data.dtype}", buffer.data)
    for name, param in _named_parameters(chunks):
        if param.grad is not None:
            ledger.add(GRADIENTS, _pattern(name), param.grad)
    if isinstance(run, TrainingRun):
        for kind, tensor in run.optimizer.tensors_by_kind():
            ledger.add(OPTIMIZER, kind, tensor)
    tensors = [o for o in gc.get_objects() if issubclass(type(o), Tensor)]
    for kind, name, tensor in _saved_for_backward(chunks, tensors):
        ledger.add(kind, name, tensor)
    for tensor in tensors:
        ledger.add("other tensors", "", tensor)
    return ledger.largest_first()


class _Ledger:
    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._bytes: Counter[tuple[str, str]] = Counter()
        self._count: Counter[tuple[str, str]] = Counter()

    def add(self, kind: str, name: str, tensor: Tensor) -> None:
        """Count ``tensor``, unless its storage has an owner or is on another kind of device."""
        if tensor.device.type != device.current().type or tensor.is_sparse:
            return
        storage = local_part(tensor).untyped_storage()
        if storage._cdata not in self._seen and storage.nbytes():
            self._seen.add(storage._cdata)
            self._bytes[kind, name] += storage.nbytes()
            self._count[kind, name] += 1

    def largest_first(self) -> list[Owner]:
        """Return the owners of the added tensors, the largest first."""
        return [Owner(*key, size, self._count[key]) for key, size in self._bytes.most_common()]


def _named_parameters(chunks: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    for chunk in chunks:
        for name, param in chunk.named_parameters():
            yield name.removeprefix("module.").removeprefix("module."), param


def _pattern(name: str) -> str:
    """Return one name for the same parameter of all layers."""
    return re.sub(r"\.\d+\.", ".*.", name)


def _saved_for_backward(
    chunks: Sequence[nn.Module], tensors: list[Tensor]
) -> Iterator[tuple[str, str, Tensor]]:
    """Yield what the autograd graphs of ``tensors`` have saved: kind, name, tensor.

    The name consists of module and operation.  An operation without parameters counts for the
    module that reads its result.
    """
    names = {id(p): _pattern(name).rpartition(".")[0] for name, p in _named_parameters(chunks)}
    todo = [(node, "") for node in _last_nodes([t.grad_fn for t in tensors if t.grad_fn])]
    seen: dict[int, Node] = {}  # holds the nodes, so that no id is reused
    while todo:
        node, module = todo.pop()
        if id(node) in seen:
            continue
        seen[id(node)] = node
        inputs = _inputs(node)
        leaves = [names.get(id(getattr(_viewed(leaf), "variable", None))) for leaf in inputs]
        module = next(filter(None, leaves), module)
        operation = re.sub("Backward[0-9]*$", "", type(node).__name__)
        name = LOGITS if operation in _LOSSES else f"{module} {operation}".strip()
        for tensor in _saved(node):
            yield ACTIVATIONS, name, tensor
        todo += [(following, module) for following in inputs]


def _last_nodes(nodes: list[Node]) -> list[Node]:
    """Return those of ``nodes`` that no other node reads; they keep all others alive."""
    consumed: dict[int, Node] = {}  # holds the nodes, so that no id is reused
    todo = list(nodes)
    while todo:
        new = {id(child): child for child in _inputs(todo.pop()) if id(child) not in consumed}
        consumed |= new
        todo += new.values()
    return [node for node in nodes if id(node) not in consumed]


def _viewed(node: Node) -> Node:
    """Return the node of which ``node`` is a view: GEMMs read the transpose of a weight."""
    while type(node).__name__ in _VIEWS and _inputs(node):
        (node,) = _inputs(node)
    return node


def _inputs(node: Node) -> list[Node]:
    return [following for following, _ in node.next_functions if following is not None]


def _saved(node: Node) -> Iterator[Tensor]:
    """Yield the tensors that an operation has saved; none after its backward pass."""
    names = [name for name in dir(node) if name.startswith("_saved_")] or ["saved_tensors"]
    for name in names:
        try:
            value = getattr(node, name, ())
        except RuntimeError:  # freed
            continue
        for one in value if isinstance(value, list | tuple) else [value]:
            if isinstance(one, Tensor):
                yield one
