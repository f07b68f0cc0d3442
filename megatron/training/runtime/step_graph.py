"""All micro-batches of a step as one CUDA graph (--cuda-graph-scope full_iteration).

Recorded are forward and backward passes and what sums gradients over ranks; the update is not.
Micro-batches are copied to where the recorded one lay.  Recording computes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core import device
from megatron.core.tensor_parallel.random import get_rng_tracker

Batch = dict[str, Tensor]
Passes = Callable[[Iterator[Batch] | None], list[dict[str, Tensor]]]


class StepGraph:
    """The passes of a step.

    Eager for ``num_warmup_steps``, again when micro-batches change in number or shape.
    """

    def __init__(self, num_warmup_steps: int) -> None:
        self._num_warmup_steps, self._num_eager = num_warmup_steps, 0
        self._key: object = None
        self._graph: device.Graph | None = None
        self._batches: list[Batch] = []  # where the graph reads them
        self._reported: list[dict[str, Tensor]] = []  # where it writes
        self._grads: list[tuple[nn.Parameter, Tensor | None]] = []

    def run(
        self,
        passes: Passes,
        data: Iterator[Batch] | None,
        num_microbatches: int,
        models: Sequence[Any],
    ) -> list[dict[str, Tensor]]:
        """What ``passes(data)`` reports; it leaves the gradients of ``models``.

        Collective where ``passes`` is.  The numbers are written over in the next step.
        """
        batches = [] if data is None else [next(data) for _ in range(num_microbatches)]
        key = num_microbatches, [(n, t.shape, t.dtype) for b in batches for n, t in b.items()]
        if key != self._key:
            self.release()
            self._key, self._num_eager = key, 0
        if self._num_eager < self._num_warmup_steps:
            self._num_eager += 1
            return passes(None if data is None else iter(batches))
        for model in models:  # nobody waits for parameters inside
            model.finish_param_sync(values=False)
        graph = self._graph or self._record(passes, batches, models)
        for fixed, batch in zip(self._batches, batches, strict=True):
            for name, tensor in fixed.items():
                tensor.copy_(batch[name], non_blocking=True)
        graph.replay()
        for param, grad in self._grads:
            param.grad = grad
        return self._reported

    def release(self) -> None:
        """Let go of the graph, its memory and its groups."""
        if self._graph is not None:
            self._graph.release()
        self._graph, self._batches, self._reported, self._grads = None, [], [], []

    def _record(
        self, passes: Passes, batches: list[Batch], models: Sequence[nn.Module]
    ) -> device.Graph:
        here = device.current()
        self._batches = [
            {n: torch.zeros_like(t, device=here) for n, t in b.items()} for b in batches
        ]
        graph = self._graph = device.Graph(device.graph_pool(), get_rng_tracker().streams())
        with device.about_to_record(), graph.recording():
            self._reported = passes(iter(self._batches) if batches else None)
        # Gradients that lie in no buffer: a step begins by forgetting them.
        self._grads = [(p, p.grad) for model in models for p in model.parameters()]
        return graph
