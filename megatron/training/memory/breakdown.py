"""List the owners of this rank's device memory by name, after an allocation has failed.

Each storage counts once, for its first owner: a parameter, a gradient buffer, the optimizer, what
autograd saved for backward (named by the module whose backward reads it), any other tensor.
"""

from __future__ import annotations

import gc
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor, nn
from torch.autograd.graph import Node

from megatron.core import device
from megatron.core.params.param_info import local_part
from megatron.core.peft.lora import stored_tensors
from megatron.training.runtime.context import RunContext
from megatron.training.step.run import ModelRun, TrainingRun

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
