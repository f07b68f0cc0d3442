"""Trace each distinct layer a few times, not every layer of a deep stack.

A `TransformerBlock` runs its layers in spans.  Two spans are of one kind when their modules have
the same classes, settings and parameter shapes.  What a span allocates, frees and sends depends on
its kind and on the kinds of its neighbours, which may free what it has made.  `Repeats` lets a pass
skip spans whose kind and neighbours another span shares, and adds their costs afterwards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.transformer.transformer_block import Span, TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.planning.tracing import Label, Measured, Segment, Tracker, joined

_OWN_PACKAGE = "megatron."
_NAMES = {"layer_number", "layer_index"}  # of a layer, in logs and caches


class Repeats:
    """Skips repeated spans in the blocks of ``models`` and adds their costs."""

    def __init__(self, tracker: Tracker, models: Iterable[nn.Module]) -> None:
        """Make the blocks of ``models`` run their spans through this object."""
        self._tracker = tracker
        self._blocks: dict[int, _Block] = {}
        self._gradient_bytes = 0  # of parameters in skipped spans
        self._held = 0  # bytes of skipped spans since their micro-batch began
        for model in models:
            for module in model.modules():
                if isinstance(module, TransformerBlock):
                    module.span_runner = self._run_span

    def measure(self, function: Callable[[], object], *, frees_graph: bool) -> Measured:
        """Call a pass and return its cost, skipped spans included.

        ``frees_graph``: it is the last pass of a micro-batch.  At its end the memory that skipped
        spans still hold is freed.
        """
        segments = list(self._completed(self._tracker.record(function)))
        self._held += sum(segment.kept for segment in segments if segment.is_skipped)
        if frees_graph:
            segments.append(Segment(None, 0, -self._held, Counter()))
            self._held = 0
        return joined(segments)

    @property
    def lasting(self) -> int:
        """Bytes that skipped spans would hold after all passes, besides gradients."""
        alive = self._tracker.alive_by_label()
        left = sum(
            min(alive[Label(identity, i)] for i in block.of_kind(number))
            for identity, block in self._blocks.items()
            for number in block.skipped
        )
        return left - self._gradient_bytes

    def make_gradients(self) -> None:
        """Allocate the gradients that backward leaves on the parameters of skipped spans."""
        before = self._tracker.alive
        for block in self._blocks.values():
            for number in block.skipped:
                traced_layers = block.parameters(block.equal_to[number])
                for skipped, traced in zip(block.parameters(number), traced_layers, strict=True):
                    if skipped.grad is None and traced.grad is not None:
                        skipped.grad = torch.empty_like(traced.grad)
        self._gradient_bytes += self._tracker.alive - before

    def _run_span(
        self,
        block: TransformerBlock,
        span: Span,
        hidden_states: Tensor,
        shared: dict[str, object],
    ) -> Tensor:
        if id(block) not in self._blocks:
            self._blocks[id(block)] = _Block(block)
        known = self._blocks[id(block)]
        number = known.spans.index(span)
        if number in known.skipped:
            return hidden_states
        label = Label(id(block), number)
        self._tracker.mark(label)
        result = block.run_span(span, hidden_states, shared)
        if result.requires_grad:  # the gradient arrives when the next span's backward is over
            result.register_hook(lambda _: self._tracker.mark(label))
        return result

    def _completed(self, segments: Sequence[Segment]) -> Iterator[Segment]:
        """Yield ``segments``, and those of skipped spans where they would have run."""
        before: Label | None = None
        known = {segment.label: segment for segment in segments}
        for segment in segments:
            label = segment.label
            if before is not None and label is not None and before.block == label.block:
                step = 1 if label.number > before.number else -1
                block = self._blocks[label.block]
                for number in range(before.number + step, label.number, step):
                    traced = known[Label(label.block, block.equal_to[number])]
                    yield traced._replace(is_skipped=True)
            yield segment
            before = label


class _Block:
    """The traced spans of a block, and the traced span that represents each other one."""

    def __init__(self, block: TransformerBlock) -> None:
        self.spans = block.spans()
        signatures = _Signatures()
        layers = [signatures.of(layer) for layer in block.layers]
        self._kinds = [(s.is_recomputed, *layers[s.start : s.stop]) for s in self.spans]
        traced = traced_spans(self._kinds)
        contexts = _contexts(self._kinds)
        by_context = {contexts[number]: number for number in traced}
        self.equal_to = [by_context[context] for context in contexts]
        self.skipped = set(range(len(self.spans))) - set(traced)
        self._traced = traced
        self._layers = block.layers

    def parameters(self, number: int) -> Iterator[nn.Parameter]:
        """Yield the parameters of the layers of span ``number``."""
        span = self.spans[number]
        for i in range(span.start, span.stop):
            yield from self._layers[i].parameters()

    def of_kind(self, number: int) -> list[int]:
        """Return the traced spans of the kind of span ``number``."""
        return [i for i in self._traced if self._kinds[i] == self._kinds[number]]


def traced_spans(kinds: Sequence[Hashable]) -> list[int]:
    """Return the numbers of the spans to trace, in order.

    For each span, one of its kind is traced whose neighbours, also among the traced spans, have the
    same kinds as its own.  Of a kind that is skipped, at least two spans are traced: a single one
    may hold memory that is allocated once for all.

    >>> traced_spans("AAAAAAAA")
    [0, 1, 7]
    >>> traced_spans("ABABABABAB")
    [0, 1, 2, 9]
    """
    left = list(range(len(kinds)))
    begin = 1
    while begin < len(left):
        for end in range(len(left) - 1, begin, -1):
            rest = left[:begin] + left[end:]
            if _can_replace(kinds, left, begin, end):
                left = rest
                break
        else:
            begin += 1
    return left


def _can_replace(kinds: Sequence[Hashable], left: list[int], begin: int, end: int) -> bool:
    """Return whether ``left`` without items ``begin`` to ``end`` still represents all spans."""
    now = [kinds[i] for i in left]
    if now[begin - 1 : begin + 1] != now[end - 1 : end + 1]:
        return False
    contexts, kept = _contexts(now), [*range(begin), *range(end, len(now))]
    are_known = {contexts[i] for i in range(begin, end)} <= {contexts[i] for i in kept}
    count = Counter(now[i] for i in kept)
    return are_known and all(count[kind] >= 2 for kind in now[begin:end])


def _contexts(kinds: Sequence[Hashable]) -> list[Hashable]:
    """Return for each span the kind of the previous one, its own and that of the next one."""
    padded = [None, *kinds, None]
    return [tuple(padded[i : i + 3]) for i in range(len(kinds))]


class _Signatures:
    """Hashable values that are equal for layers with equal allocations and communication."""

    def __init__(self) -> None:
        self._known: dict[int, Hashable] = {}  # of objects that layers share

    def of(self, layer: nn.Module) -> Hashable:
        """Return the signature of a layer: classes, settings and tensors of all its modules."""
        parts: list[Hashable] = []
        for name, module in layer.named_modules():
            tensors = [
                (key, tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
                for held in (module._parameters, module._buffers)
                for key, tensor in held.items()
                if tensor is not None
            ]
            own = {k: v for k, v in vars(module).items() if not k.startswith("_")}
            parts.append((name, type(module), self._settings(own, type(module)), tuple(tensors)))
        return tuple(parts)

    def _settings(self, values: dict[str, object], owner: type) -> Hashable:
        # A class of a user may compute with the number of a layer.
        ignored = _NAMES if owner.__module__.startswith(_OWN_PACKAGE) else set()
        return tuple((k, self._setting(v)) for k, v in values.items() if k not in ignored)

    def _setting(self, value: object) -> Hashable:
        if isinstance(value, float):
            return value != 0  # a scale or a probability: only whether it is used matters
        if value is None or isinstance(value, (bool, int, str, type, range)):
            return value
        if isinstance(value, (tuple, list)):
            return type(value), tuple(self._setting(item) for item in value)
        if isinstance(value, dict):
            return self._settings(value, TransformerBlock)
        if isinstance(value, partial):
            return self._setting((value.func, value.args, value.keywords))
        if id(value) not in self._known:
            self._known[id(value)] = self._of_object(value)
        return self._known[id(value)]

    def _of_object(self, value: Any) -> Hashable:
        if isinstance(value, dist.ProcessGroup):
            return value.group_name
        is_ours = type(value).__module__.startswith(_OWN_PACKAGE)
        if is_ours and hasattr(value, "__dict__") and not isinstance(value, _SHARED):
            self._known[id(value)] = id(type(value))  # for references to itself
            return type(value), self._settings(vars(value), type(value))
        return id(value)


_SHARED = TransformerConfig, nn.Module, FunctionType
