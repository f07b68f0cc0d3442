"""Adjust recomputation to the measured peak memory (--recompute-granularity adaptive)."""

from __future__ import annotations

from megatron.core import device
from megatron.core.parallel.collectives import largest_of_ranks
from megatron.core.transformer.adaptive_recompute import SavedBytes, Search, apply
from megatron.training.process.rank_print import print_rank_0
from megatron.training.runtime.context import StepResult
from megatron.training.step.run import Callback, TrainingRun

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
        self._blocks = [
            module
            for chunk in run.model_chunks
            for module in chunk.modules()
            if getattr(module, "recomputed_layers", None) is not None
        ]
        layers = sum(len([*block.get_submodule("layers").children()]) for block in self._blocks)
        (most,) = largest_of_ranks([layers])
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
        apply(self._blocks, self._search.kept)
        if changed or self._search.is_settled > was_settled:
            print_rank_0(self._found(peak))
        if peak > self._search.limit and not any(self._search.kept.values()):
            print_rank_0(
                f"WARNING: with everything recomputed a step takes {peak / _GIB:.4f} GiB, more "
                "than --memory-budget-fraction allows: use a smaller --micro-batch-size or more "
                "model parallelism"
            )

    def _found(self, peak: float) -> str:
        search = self._search
        kept = ", ".join(f"{part} {count}" for part, count in search.kept.items())
        return (
            f"adaptive recomputation ({'settled' if search.is_settled else 'trying'}): peak "
            f"{peak / _GIB:.4f} of {search.limit / _GIB:.4f} GiB; of {search.num_layers} layers a "
            f"rank so many keep: {kept}"
        )
