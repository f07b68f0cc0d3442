"""Recomputation that finds out how little of it is enough.

It begins with everything: a first step that does not fit could not be taken back.  Then layers
keep, part by part and the dearest part first, what would be computed again, as long as the
measured peak stays within the budget.  Which bits come out does not depend on any of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

# What a layer may keep, dearest to compute again first (docs/recompute.md has the numbers).
PARTS = ("layer", "mlp", "core_attn", "layernorm")


@dataclass
class Search:
    """How many of ``num_layers`` layers keep each part such that the peak stays below ``limit``.

    Part by part: one layer keeps it, then twice as many each time, as long as the last growth of
    the peak says that they fit; what turns out to be too many is taken back one at a time.
    """

    num_layers: int
    limit: float
    kept: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PARTS, 0))
    _part: int = -1  # the one under search; -1 before the first peak
    _peak: float = 0.0  # before the last layers were added
    _added: int = 0  # layers; 0 once some were taken back

    @property
    def is_settled(self) -> bool:
        """Whether nothing more is tried."""
        return self._part == len(PARTS)

    def observe(self, peak: float) -> bool:
        """Take the peak of a step with ``kept``; returns whether ``kept`` has changed.

        Ranks that are to decide alike observe the same peaks.
        """
        before = dict(self.kept)
        if peak > self.limit:
            self._take_back()
        elif not self.is_settled and not self._add(self._fitting(peak), peak):
            self._try_next_part(peak)
        return self.kept != before

    def _fitting(self, peak: float) -> int:
        """Further layers that surely can keep the part under search."""
        if not self._added:
            return 0
        kept, growth = self.kept[PARTS[self._part]], (peak - self._peak) / self._added
        left = min(self._most() - kept, kept)
        return left if growth <= 0 else min(left, int((self.limit - peak) / growth))

    def _most(self) -> int:
        """Layers that may keep the part under search: those that are not computed again whole."""
        return self.num_layers if self._part == 0 else self.kept["layer"]

    def _add(self, count: int, peak: float) -> bool:
        if count:
            self.kept[PARTS[self._part]] += count
            self._peak, self._added = peak, count
        return bool(count)

    def _try_next_part(self, peak: float) -> None:
        self._part, self._added = self._part + 1, 0
        if not self.is_settled and not self._add(min(1, self._most()), peak):
            self._part = len(PARTS)  # no layer keeps anything

    def _take_back(self) -> None:
        """One layer less keeps the part under search; behind the search, any part."""
        searched = PARTS[self._part : self._part + 1] if self._part >= 0 else ()
        given = [part for part in (*searched, *reversed(PARTS)) if self.kept[part]]
        if given:
            self.kept[given[0]] -= 1
        else:  # nothing is kept, and still it does not fit
            self._part = len(PARTS)
        self._added = 0


def apply(blocks: Sequence[Any], kept: dict[str, int]) -> None:
    """Let the last layers of this rank's ``blocks`` keep what ``kept`` says."""
    num_layers, start = sum(len(block.layers) for block in blocks), 0
    whole = max(0, num_layers - kept["layer"])
    for block in blocks:
        block.recomputed_layers = min(max(0, whole - start), len(block.layers))
        for i, layer in enumerate(block.layers, start):
            behind = num_layers - 1 - i
            again = {part: i >= whole and behind >= kept[part] for part in PARTS[1:]}
            layer.recomputes_mlp = again["mlp"]
            layer.recomputes_norms = again["layernorm"] and layer.may_recompute_norms
            layer.self_attention.recomputes_core = again["core_attn"]
        start += len(block.layers)


class SavedBytes:
    """Bytes that autograd holds for backward, parameters left out: the meter where there is no GPU.

    Between `start` and `stop`, on the thread that called them.
    """

    def __init__(self) -> None:
        self.alive = self.peak = 0
        self._holders: dict[int, int] = {}  # storage -> how often it is held
        self._hooks: torch.autograd.graph.saved_tensors_hooks | None = None

    def start(self) -> None:
        """Meter from now on, the peak from 0."""
        self.peak = self.alive
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._hold, _give)
        self._hooks.__enter__()

    def stop(self) -> int:
        """The peak since `start`."""
        assert self._hooks is not None, "not started"
        self._hooks.__exit__()
        return self.peak

    def _hold(self, tensor: Tensor) -> Tensor | _Held:
        if tensor.is_leaf and tensor.requires_grad:
            return tensor
        return _Held(self, tensor)

    def add(self, storage: int, num_bytes: int) -> None:
        """One more holder of a storage."""
        count = self._holders.get(storage, 0)
        self._holders[storage] = count + 1
        if not count:
            self.alive += num_bytes
            self.peak = max(self.peak, self.alive)

    def remove(self, storage: int, num_bytes: int) -> None:
        """One holder less."""
        self._holders[storage] -= 1
        if not self._holders[storage]:
            del self._holders[storage]
            self.alive -= num_bytes


class _Held:
    """A saved tensor, until autograd lets go of it."""

    def __init__(self, meter: SavedBytes, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self.tensor, self._meter = tensor, meter
        self._counted = storage._cdata, storage.nbytes()
        meter.add(*self._counted)

    def __del__(self) -> None:
        self._meter.remove(*self._counted)


def _give(held: Tensor | _Held) -> Tensor:
    return held.tensor if isinstance(held, _Held) else held
