"""Graphs of decode steps: forward passes in which every request has one token.

Such a step has little work per kernel: the host of a GPU needs longer to launch the kernels than
the device to run them, and on a CPU Python takes a fifth of the step of a small model.  A graph is
captured for a number of rows and of pages in a request, at its first use: requests are padded to a
captured number with rows that use the extra page and slot of the cache, and block tables to a
power of two pages.  The integers of a step are copied into the buffer that the graph reads.
Sampling is not part of a graph.

On a GPU these are CUDA graphs.  All ranks execute equal plans, so they capture the
collectives of the model together.  On a CPU they are `HostGraph`s of every number of rows up to
`_MOST_HOST_ROWS`, for a model that one rank holds; they do not change a bit.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from torch import Tensor, nn

from megatron.core import device
from megatron.core.device import cpu_kernels
from megatron.core.device.host_graph import Arena, HostGraph
from megatron.core.inference.fast_linear import FastLinear
from megatron.core.inference.paged_engine.cache import BatchView, PagedCache, SlotPositions
from megatron.core.inference.paged_engine.step_plan import SAMPLE_ONLY, StepPlan, idle_segment
from megatron.core.tensor_parallel.layers import Linear
from megatron.core.transformer.attention import SelfAttention

Forward = Callable[[BatchView], Tensor]

_MOST_HOST_ROWS = 64  # with more, computing takes so long that the host's share is small


class _Captured(NamedTuple):
    integers: Tensor  # static input
    graph: device.Graph | HostGraph
    logits: Tensor  # static output; the next replay of any graph overwrites it


class DecodeGraphs:
    """The graphs of one model.  ``forward`` maps a view to logits [1, r, v] on this rank."""

    def __init__(
        self, module: nn.Module, pages: PagedCache, num_graphs: int, forward: Forward
    ) -> None:
        """``num_graphs``: numbers of rows that are captured; -1: every number."""
        self._module = module
        self._cache = pages
        self._forward = forward
        self._captured: dict[tuple[int, int], _Captured] = {}
        self._is_on_host = not device.records_graphs()
        most = pages.max_requests
        if self._is_on_host:  # rows that are added take time there
            self._sizes = captured_sizes(-1 if num_graphs else 0, min(most, _MOST_HOST_ROWS))
        else:
            self._sizes = captured_sizes(num_graphs, most)
        self._is_possible = _can_be_held(module, is_on_host=self._is_on_host)
        self._pool = cache(device.graph_pool)  # one memory pool: no output outlives its step
        self._arena = Arena()

    def run(self, plan: StepPlan, slots: SlotPositions) -> Tensor | None:
        """Return the logits of a decode step [1, r, v], until the next call; None: not possible.

        The first step of a size runs without a graph and is captured afterwards.
        """
        count = len(plan.segments)
        if not (self._is_possible and self._sizes and _is_decoding(plan)):
            return None
        if count > self._sizes[-1]:
            return None
        rows = self._sizes[bisect_left(self._sizes, count)]
        width = 1 << (max(len(s.pages) for s in plan.segments) - 1).bit_length()
        idle = idle_segment(self._cache.max_requests, self._cache.num_pages, SAMPLE_ONLY)
        known = self._captured.get((rows, width))
        view = BatchView(
            self._cache,
            replace(plan, segments=[*plan.segments, *[idle] * (rows - count)]),
            next(self._module.parameters()).device,
            slots=slots,
            width=width,
            into=None if known is None else known.integers,
        )
        if known is not None:
            known.graph.replay()
            return known.logits[:, :count]
        record = self._record if self._is_on_host else self._capture
        logits, captured = record(view)
        if captured is not None:
            self._captured[rows, width] = captured
        return logits[:, :count]

    def release(self) -> None:
        """Free all graphs: weights may have another address afterwards."""
        for captured in self._captured.values():
            captured.graph.release()
        self._captured.clear()
        self._arena = Arena()

    def _capture(self, view: BatchView) -> tuple[Tensor, _Captured | None]:
        """Return the logits of a step on a GPU, and its graph if it can be captured."""
        logits = self._forward(view)
        if view.reads_host:  # a layer needs the numbers of the plan: a graph would repeat these
            self._is_possible = False
            return logits, None
        graph = device.Graph(self._pool())
        stream = device.side_stream()  # the default stream cannot be captured
        with device.about_to_record(), device.on_stream(stream), graph.recording():
            static = self._forward(view)
        device.join_stream(stream)
        return logits, _Captured(view.integers, graph, static)

    def _record(self, view: BatchView) -> tuple[Tensor, _Captured | None]:
        """Compute a step on a CPU and record it at the same time, if that is possible."""
        graph = HostGraph(self._arena)
        with graph.recording():
            logits = self._forward(view)
        if view.reads_host or graph.refusal is not None:
            self._is_possible = False
            return logits, None
        return logits, _Captured(view.integers, graph, graph.result(logits))


def _can_be_held(module: nn.Module, *, is_on_host: bool) -> bool:
    """Return whether graphs can hold the matmuls of ``module``: not those that look at numbers."""
    quantizers = [m.quantizer for m in module.modules() if isinstance(m, Linear)]
    if any(m.quantizer is not None for m in module.modules() if isinstance(m, SelfAttention)):
        return False
    if is_on_host:
        return cpu_kernels.can_record() and all(isinstance(q, FastLinear) for q in quantizers)
    return not any(quantizers)


def captured_sizes(num_graphs: int, most: int) -> list[int]:
    """Return at most ``num_graphs`` numbers of rows up to ``most``, evenly spaced; -1: all."""
    count = most if num_graphs < 0 else min(num_graphs, most)
    return sorted({-(-most * i // count) for i in range(1, count + 1)})


def _is_decoding(plan: StepPlan) -> bool:
    return bool(plan.segments) and all(
        len(s.tokens) == len(s.targets) == 1 and s.start for s in plan.segments
    )
