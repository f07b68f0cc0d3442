"""Capture all micro-batches of a step as one CUDA graph (--cuda-graph-scope full_iteration).

The graph contains forward and backward passes and gradient reductions, not the optimizer update.
Before each replay the micro-batches are copied into static input buffers.  Capture computes
nothing: the captured step is replayed right after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core import device
from megatron.core.pipeline_parallel.microbatch import StepLosses
from megatron.core.tensor_parallel.random import get_rng_tracker
from megatron.core.transformer.transformer_config import TransformerConfig

Batch = dict[str, Tensor]
Passes = Callable[[Iterator[Batch] | None], StepLosses]


class StepGraph:
    """CUDA graph of the forward and backward passes of a step.

    The first ``num_warmup_steps`` steps run eagerly, and so do as many steps after a change in
    number or shape of the micro-batches, which discards the graph.
    """

    def __init__(self, num_warmup_steps: int) -> None:
        self._num_warmup_steps, self._num_eager = num_warmup_steps, 0
        self._key: object = None
        self._graph: device.Graph | None = None
        self._batches: list[Batch] = []  # static inputs of the graph
        self._losses = StepLosses()  # static outputs of the graph
        self._grads: list[tuple[nn.Parameter, Tensor | None]] = []

    @classmethod
    def of(cls, config: TransformerConfig) -> StepGraph | None:
        """Return the graph that the flags of a run request, None if they request none."""
        is_one_graph = config.uses_graphs and not config.captures_layers
        return (
            cls(config.cuda_graph_warmup_steps)
            if is_one_graph and device.records_graphs()
            else None
        )

    def run(
        self,
        passes: Passes,
        data: Iterator[Batch] | None,
        num_microbatches: int,
        models: Sequence[Any],
    ) -> StepLosses:
        """Run ``passes(data)`` eagerly, or replay its graph; return what it returns.

        Leaves the gradients of ``models`` set.  Collective if ``passes`` is.  The returned tensors
        are static buffers of the graph: the next step overwrites them.
        """
        batches = [] if data is None else [next(data) for _ in range(num_microbatches)]
        key = num_microbatches, [(n, t.shape, t.dtype) for b in batches for n, t in b.items()]
        if key != self._key:
            self.release()
            self._key, self._num_eager = key, 0
        if self._num_eager < self._num_warmup_steps:
            self._num_eager += 1
            return passes(None if data is None else iter(batches))
        for model in models:  # a graph cannot wait for parameter all-gathers
            model.finish_param_sync(values=False)
        graph = self._graph or self._record(passes, batches, models)
        for fixed, batch in zip(self._batches, batches, strict=True):
            for name, tensor in fixed.items():
                tensor.copy_(batch[name], non_blocking=True)
        graph.replay()
        for param, grad in self._grads:
            param.grad = grad
        return self._losses

    def release(self) -> None:
        """Free the graph, its memory and its references to communicators."""
        if self._graph is not None:
            self._graph.release()
        self._graph = None
        self._batches = []
        self._losses = StepLosses()
        self._grads = []

    def _record(
        self, passes: Passes, batches: list[Batch], models: Sequence[nn.Module]
    ) -> device.Graph:
        here = device.current()
        self._batches = [
            {n: torch.zeros_like(t, device=here) for n, t in b.items()} for b in batches
        ]
        graph = self._graph = device.Graph(device.graph_pool(), get_rng_tracker().streams())
        with device.about_to_record(), graph.recording():
            self._losses = passes(iter(self._batches) if batches else None)
        # Gradients outside the gradient buffers: zero_grad() drops them, so `run` sets them again.
        self._grads = [(p, p.grad) for model in models for p in model.parameters()]
        return graph
