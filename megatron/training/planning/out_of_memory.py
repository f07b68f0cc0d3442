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
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor, nn
from torch.autograd.graph import Node

from megatron.core import device
from megatron.core.config.errors import OutOfMemory
from megatron.core.params.param_info import local_part
from megatron.core.peft.lora import stored_tensors
from megatron.training.config.run import RunConfig
from megatron.training.process.exit_report import current_phase
from megatron.training.process.rank_print import rank, ranks_here
from megatron.training.runtime.context import RunContext
from megatron.training.step.run import ModelRun, TrainingRun

_GIB = 2**30
_SHOWN = 10
_SIGNS = ("can't allocate memory", "not enough memory", "out of memory", "bad_alloc")
_ASKED = re.compile(r"(?:[Tt]ried|Unable) to allocate ([\d.]+) (\w+)")
_CHUNK = 1024  # tokens whose logits exist at a time
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
        text = "\n".join([*head, *_largest(held), *_suggested_fixes(run)])
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
    trace = [
        (os.path.relpath(f.f_code.co_filename), line, f.f_code.co_name)
        for f, line in traceback.walk_tb(error.__traceback__)
    ]
    for path, line, name in [place for place in trace if "megatron" in place[0]][-1:]:
        yield f"  at {path}:{line} {name}"
    used = {key: size / _GIB for key, size in device.memory_stats().items()}
    in_pieces = used["reserved"] - used["allocated"]
    yield (
        f"  {device.name()}: {used['allocated']:.3f} GiB in use (most so far "
        f"{used['max_allocated']:.3f}), "
        + (f"{in_pieces:.3f} GiB free in pieces, " if in_pieces else "")
        + f"of {_memory() / _GIB:.3f} GiB for this rank"
    )


def _largest(held: list[Owner]) -> Iterator[str]:
    yield f"what holds most, GiB (of {sum(o.num_bytes for o in held) / _GIB:.3f} in tensors):"
    for owner in held[:_SHOWN]:
        of = f" of {owner.name}" if owner.name else ""
        yield f"  {owner.num_bytes / _GIB:9.3f}  {owner.kind}{of} ({owner.num_tensors})"
    rest = sum(owner.num_bytes for owner in held[_SHOWN:])
    yield f"  {rest / _GIB:9.3f}  everything else"


def _suggested_fixes(run: RunContext) -> Iterator[str]:
    yield "what would help, the cheapest first:"
    for values in changes(run.config):
        yield f"  {flags_of(values)}"
    yield (
        f"--check-only --check-world-size {run.config.world_size} --check-device-memory-gib "
        f"{_memory() / _GIB:.1f} plans this run without a GPU, and finds the cheapest that fits"
    )


def changes(config: RunConfig) -> Iterator[dict[str, object]]:
    """Yield possible changes of arguments, dest -> value, the cheapest first."""
    m = config.model
    training = config.training
    tp = m.tensor_model_parallel_size
    pp = m.pipeline_model_parallel_size
    if tp > 1 and not m.sequence_parallel:
        yield {"sequence_parallel": True}
    if config.data_parallel_size > 1 and not config.optimizer.use_distributed_optimizer:
        yield {"use_distributed_optimizer": True}
    if m.recompute_granularity is None:
        yield {"recompute_granularity": "selective"}
    batch = training.micro_batch_size
    tokens = batch * config.data.seq_length // m.context_parallel_size
    if not m.loss_chunk_size and tokens >= 2 * _CHUNK and not m.defer_embedding_wgrad_compute:
        yield {"loss_chunk_size": _CHUNK}
    if batch % 2 == 0:
        yield {"micro_batch_size": batch // 2}
    if m.recompute_granularity != "full":
        values = {"granularity": "full", "method": "uniform", "num_layers": 1}
        yield {f"recompute_{key}": value for key, value in values.items()}
    yield {"tensor_model_parallel_size": 2 * tp, "sequence_parallel": True}
    yield {"pipeline_model_parallel_size": 2 * pp}


def flags_of(values: Mapping[str, object]) -> str:
    """Return the flags that set ``values``, dest -> value."""
    return " ".join(
        f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}")
        for name, value in values.items()
    )


def _memory() -> int:
    return device.total_memory(ranks_here())


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
    seen: set[int] = set()
    sizes: Counter[tuple[str, str]] = Counter()
    counts: Counter[tuple[str, str]] = Counter()
    for kind, name, tensor in _owned(run):
        if tensor.device.type != device.current().type or tensor.is_sparse:
            continue
        storage = local_part(tensor).untyped_storage()
        if storage._cdata not in seen and storage.nbytes():
            seen.add(storage._cdata)
            sizes[kind, name] += storage.nbytes()
            counts[kind, name] += 1
    return [Owner(*key, size, counts[key]) for key, size in sizes.most_common()]


def _owned(run: RunContext) -> Iterator[tuple[str, str, Tensor]]:
    """Yield kind and name of the owner of each tensor; the first owner of a storage counts."""
    chunks = run.model_chunks if isinstance(run, ModelRun) else []
    for name, param in _named_parameters(chunks):
        yield "parameters", _pattern(name), param
        if (stored := getattr(param, "gathered_codes", None)) is not None:
            yield "parameters", "weights stored in 8 bits", stored.scaled.codes
    for chunk in chunks:
        for tensor in stored_tensors(chunk):
            yield "parameters", f"frozen weights in {tensor.dtype}", tensor
        for buffer in getattr(chunk, "grad_buffers", {}).values():
            yield GRADIENTS, f"buffers in {buffer.grad_data.dtype}", buffer.grad_data
    for name, param in _named_parameters(chunks):
        if param.grad is not None:
            yield GRADIENTS, _pattern(name), param.grad
    if isinstance(run, TrainingRun):
        for kind, tensor in run.optimizer.tensors_by_kind():
            yield OPTIMIZER, kind, tensor
    tensors = [o for o in gc.get_objects() if issubclass(type(o), Tensor)]
    yield from _saved_for_backward(chunks, tensors)
    for tensor in tensors:
        yield "other tensors", "", tensor


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
