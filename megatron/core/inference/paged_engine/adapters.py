"""Low-rank adapters that requests name: rows of one forward pass can have different ones.

A layer multiplies all rows by its weight at once.  Then each adapter of the step adds its term to
the rows of its requests.  A row of the batch is one of ``N`` tokens, or, behind the choice of
output rows, one of ``r``.  All ranks hold the same adapters under the same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from megatron.core.inference.paged_engine.step_plan import Admission, StepPlan
from megatron.core.tensor_parallel.layers import Adapter, Linear, VocabParallelEmbedding

Layer: TypeAlias = Linear | VocabParallelEmbedding
LayerAdapters: TypeAlias = Mapping[Layer, Adapter]  # one adapter: a term for each of its layers


class AdapterStore:
    """The adapters on one rank, by number, and those of the requests in its slots."""

    def __init__(self, max_requests: int, device: torch.device) -> None:
        self._device = device
        self._of_slot = np.zeros(max_requests, dtype=np.int64)  # 0: none
        self._layers: dict[Layer, _RowsOfRequests] = {}
        self._is_active = False

    def load(self, number: int, adapter: LayerAdapters) -> None:
        """Take an adapter; no layer may have one of its own."""
        for layer, term in adapter.items():
            self._layers.setdefault(layer, _RowsOfRequests()).terms[number] = term

    def drop(self, number: int) -> None:
        """Free the adapter of a number, which no request has any more."""
        for rows in self._layers.values():
            rows.terms.pop(number, None)

    def admit(self, admission: Admission) -> None:
        """Note the adapter of a request; its slot forgets the request before it."""
        self._of_slot[admission.slot] = admission.adapter

    def begin(self, plan: StepPlan) -> bool:
        """Bind the layers to the rows of a plan; return whether it has rows with adapters.

        A layer without adapters in this step is as if it had none, for graphs too.
        """
        numbers = self._of_slot[[segment.slot for segment in plan.segments]]
        found = set(numbers[numbers > 0].tolist())
        if not (found or self._is_active):
            return False
        lengths = [[len(s.tokens), len(s.targets)] for s in plan.segments]
        # Where all rows have outputs, both are the same.
        of_rows = {len(x): x for x in (numbers.repeat(n) for n in zip(*lengths, strict=True))}
        places = {
            (count, number): torch.from_numpy(np.flatnonzero(each == number)).to(self._device)
            for count, each in of_rows.items()
            for number in found
        }
        for layer, rows in self._layers.items():
            rows.places = places
            rows.numbers = sorted(found & rows.terms.keys())
            layer.lora = rows if rows.numbers else None
        self._is_active = bool(found)
        return self._is_active


class _RowsOfRequests:
    """The terms of one layer, each for the rows of its requests: `lora` of the layer."""

    def __init__(self) -> None:
        self.terms: dict[int, Adapter] = {}
        self.numbers: list[int] = []  # of the adapters of this step that have this layer
        # Number of rows and number of an adapter -> its rows.
        self.places: Mapping[tuple[int, int], Tensor] = {}

    def __call__(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """Map rows [n, .., i], or ids [n, 1], to a term of the output [n, .., o].

        ``y``: the output of the layer without adapters.
        """
        count = len(x)
        out: Tensor | None = None
        for number in self.numbers:
            rows = self.places[count, number]
            if len(rows) == count:
                term = self.terms[number](x, y)
            else:
                term = self.terms[number](x[rows], None if y is None else y[rows])
            if len(rows) == count:
                return term
            if out is None:
                out = term.new_zeros(count, *term.shape[1:])
            out[rows] = term
        assert out is not None, "a layer without adapters is not bound"
        return out

    def delta(self) -> Tensor:
        """Refuse: rows have different weights."""
        raise AssertionError("a layer whose weight is read directly has no adapters of requests")
