"""Adjust recomputation to the measured peak memory (--recompute-granularity adaptive).

The search begins with full recomputation, because a step that runs out of memory cannot be undone.
Then layers save activations instead of recomputing them, one part of a layer after the other and
the most expensive part first, as long as the measured peak stays within the budget.  Results are
bitwise identical for every setting.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.core import device
from megatron.core.parallel.collectives import largest_of_ranks
from megatron.training.process.rank_print import print_rank_0
from megatron.training.runtime.context import StepResult
from megatron.training.step.run import Callback, TrainingRun

# Parts whose activations a layer may save, most expensive to recompute first (docs/recompute.md has
# measurements).  "layer": the layer is not recomputed as a whole, only the parts it does not save.
PARTS = ("layer", "mlp", "core_attn", "layernorm")


@dataclass
class Search:
    """The search for the number of layers that may save each part with a peak up to ``limit``.

    ``kept`` maps a part to that number, 0 to ``num_layers``; ``limit`` and peaks are in bytes.  For
    each part: first one layer saves it, then the number at most doubles in each step, as far as the
    last growth of the peak predicts that it fits; if the peak exceeds the limit, the number is
    reduced by one per step.
    """

    num_layers: int
    limit: float
    kept: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PARTS, 0))
    _part: int = -1  # index in PARTS of the part under search; -1 before the first peak
    _peak: float = 0.0  # the peak before the last increase
    _added: int = 0  # layers of the last increase; 0 after a decrease

    @property
    def is_settled(self) -> bool:
        """Whether the search has ended."""
        return self._part == len(PARTS)

    def observe(self, peak: float) -> bool:
        """Update ``kept`` from the peak of a step that ran with it; return whether it changed.

        Not collective: ranks that must agree must pass the same peak.
        """
        before = dict(self.kept)
        if peak > self.limit:
            self._take_back()
        elif not self.is_settled:
            count = 0
            if self._added:  # after an increase: as many more as it lets expect
                kept = self.kept[PARTS[self._part]]
                growth = (peak - self._peak) / self._added
                count = min(self._most() - kept, kept)
                count = count if growth <= 0 else min(count, int((self.limit - peak) / growth))
            if not count:
                self._part += 1
                count = 0 if self.is_settled else min(1, self._most())
            if count:
                self.kept[PARTS[self._part]] += count
            else:  # all parts were tried, or all layers are recomputed in full
                self._part = len(PARTS)
            self._peak = peak
            self._added = count
        return self.kept != before

    def _most(self) -> int:
        """Return how many layers may save the part under search: those not recomputed in full."""
        return self.num_layers if self._part == 0 else self.kept["layer"]

    def _take_back(self) -> None:
        """Let one layer fewer save the part under search, or else the cheapest part saved."""
        searched = PARTS[self._part : self._part + 1] if self._part >= 0 else ()
        given = [part for part in (*searched, *reversed(PARTS)) if self.kept[part]]
        if given:
            self.kept[given[0]] -= 1
        else:  # full recomputation does not fit either: nothing is left to reduce
            self._part = len(PARTS)
        self._added = 0


def apply(blocks: Sequence[Any], kept: dict[str, int]) -> None:
    """Set which layers of this rank's ``blocks`` recompute which parts.

    ``kept`` is that of `Search`: so many of the last layers save a part, the others recompute it.
    """
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
    """Counter of the bytes that autograd saves for backward, without parameters.

    It measures the peak where there is no GPU memory statistic.  It counts between `start` and
    `stop`, on the thread that called them.  Each storage counts once.
    """

    def __init__(self) -> None:
        self.alive = self.peak = 0
        self._holders: Counter[int] = Counter()  # storage -> number of saved tensors that share it
        self._hooks: torch.autograd.graph.saved_tensors_hooks | None = None

    def start(self) -> None:
        """Start to count; the peak starts at the bytes that are saved now."""
        self.peak = self.alive
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._hold, _give)
        self._hooks.__enter__()

    def stop(self) -> int:
        """Stop counting; return the peak since `start` in bytes."""
        assert self._hooks is not None, "not started"
        self._hooks.__exit__()
        return self.peak

    def _hold(self, tensor: Tensor) -> Tensor | _Held:
        if tensor.is_leaf and tensor.requires_grad:
            return tensor
        storage = tensor.untyped_storage()
        self.count(storage._cdata, storage.nbytes(), 1)
        return _Held(self, tensor)

    def count(self, storage: int, num_bytes: int, change: int) -> None:
        """Count one saved tensor of a storage more (``change`` 1) or less (-1)."""
        before = self._holders[storage]
        self._holders[storage] += change
        if not (before and self._holders[storage]):  # the first one, or the last
            self.alive += change * num_bytes
            self.peak = max(self.peak, self.alive)
        if not self._holders[storage]:
            del self._holders[storage]  # another storage may get its key


class _Held(NamedTuple):
    """A saved tensor, counted until autograd drops its reference."""

    meter: SavedBytes
    tensor: Tensor

    def __del__(self) -> None:
        storage = self.tensor.untyped_storage()
        self.meter.count(storage._cdata, storage.nbytes(), -1)


def _give(held: Tensor | _Held) -> Tensor:
    return held.tensor if isinstance(held, _Held) else held


_GIB = 1 << 30


class AdaptiveRecompute(Callback):
    """Find how many layers may save each part of their activations instead of recomputing it.

    Measures the peak memory of every step until the search has ended, then of the last step of
    every log interval, in case the peak grows.  All ranks take the same decision, from the largest
    peak among them.  On a GPU the peak is that of allocated memory, on the CPU that of the tensors
    which autograd saves.
    """

    def __init__(self, budget_fraction: float, interval: int, ranks_here: int) -> None:
        self._limit, self._interval = budget_fraction * device.total_memory(ranks_here), interval
        self._meter = None if device.is_cuda() else SavedBytes()
        self._is_metered = False

    def on_train_start(self, run: TrainingRun) -> None:
        self._blocks: list[Any] = [
            module
            for chunk in run.model_chunks
            for module in chunk.modules()
            if getattr(module, "recomputed_layers", None) is not None
        ]
        (most,) = largest_of_ranks([sum(len(block.layers) for block in self._blocks)])
        self._search = Search(int(most), self._limit)
        apply(self._blocks, self._search.kept)

    def on_step_start(self, run: TrainingRun) -> None:
        following = run.state.iteration + 1
        self._is_metered = not self._search.is_settled or following % self._interval == 0
        if not self._is_metered:
            return
        device.reset_peak_memory()
        if self._meter is not None:
            self._meter.start()

    def on_step_end(self, run: TrainingRun, result: StepResult) -> None:
        if not self._is_metered:
            return
        on_device = device.memory_stats()["max_allocated"]
        taken = on_device if self._meter is None else self._meter.stop()
        (peak,) = largest_of_ranks([taken])
        was_settled = self._search.is_settled
        changed = self._search.observe(peak)
        search = self._search
        apply(self._blocks, search.kept)
        if changed or search.is_settled > was_settled:
            kept = ", ".join(f"{part} {count}" for part, count in search.kept.items())
            print_rank_0(
                f"adaptive recomputation ({'settled' if search.is_settled else 'trying'}): peak "
                f"{peak / _GIB:.4f} of {search.limit / _GIB:.4f} GiB; of {search.num_layers} "
                f"layers a rank so many keep: {kept}"
            )
        if peak > search.limit and not any(search.kept.values()):
            print_rank_0(
                f"WARNING: with everything recomputed a step takes {peak / _GIB:.4f} GiB, more "
                "than --memory-budget-fraction allows: use a smaller --micro-batch-size or more "
                "model parallelism"
            )
