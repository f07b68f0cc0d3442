"""Rows of different lengths on groups of data-parallel ranks (--hybrid-context-parallel).

A group of 1, 2, 4, .. consecutive data-parallel ranks shares a long row by context parallelism;
short rows are packed.  In each micro-batch every data-parallel rank is in one group, and the groups
differ from micro-batch to micro-batch: the layers get the group before the pass.  The loss is a sum
over tokens, so it does not depend on the plan.

Order of collectives: `BalancedRows.begin` broadcasts the sizes of this rank's groups over its
tensor-parallel ranks, once for each global batch.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.samplers import collate
from megatron.core.datasets.utils import EpochOrder
from megatron.core.packed_seq_params import PackedBounds
from megatron.core.parallel.collectives import broadcast_json
from megatron.core.parallel.context_parallel_partition import sequence_divisor
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.rank_local import each_rank_owns
from megatron.core.rerun.state_machine import RerunDataIterator
from megatron.core.transformer.context_parallel import use_context_groups
from megatron.training.runtime.context import RunContext

_FEW = 16  # tokens of a rank without rows, as 8-bit GEMMs need
# Data-parallel group -> context-parallel groups in it, by size.
_made: WeakKeyDictionary[dist.ProcessGroup, dict[int, dist.ProcessGroup]] = WeakKeyDictionary()
each_rank_owns(__name__, "_made")


@dataclass
class Slot:
    """The ``rows`` of one rank in one micro-batch, which ``size`` ranks share."""

    size: int = 1
    rows: list[int] = field(default_factory=list)
    num_tokens: int = 0


def plan_rounds(
    lengths: Sequence[int], num_ranks: int, capacity: int, work: Callable[[int], float]
) -> list[list[Slot]]:
    """Assign rows of ``lengths`` to ranks: a list of micro-batches, each with a slot per rank.

    A rank gets at most ``capacity`` tokens of a micro-batch.  A row is on the fewest ranks (a power
    of two) that hold it, longest rows first, on the ranks with the least ``work`` (of a row of so
    many tokens) so far.  The plan is a function of the arguments: all ranks compute the same.
    """
    rounds: list[list[Slot]] = []
    loads = [0.0] * num_ranks
    for row in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[row]
        size = 1
        while size * capacity < length:
            size *= 2
        assert size <= num_ranks, f"a row of {length} tokens does not fit {num_ranks} ranks"
        blocks = [slice(first, first + size) for first in range(0, num_ranks, size)]

        def fits(slots: list[Slot], size: int = size, length: int = length) -> bool:
            if size > 1:
                return not any(slot.rows for slot in slots)
            return slots[0].size == 1 and slots[0].num_tokens + length <= capacity

        places = [(r, b) for r in rounds for b in blocks if fits(r[b])]
        if not places:
            rounds.append([Slot() for _ in range(num_ranks)])
            places = [(rounds[-1], block) for block in blocks]
        slots, block = min(places, key=lambda place: max(loads[place[1]]))
        for rank in range(block.start, block.stop):
            slot = slots[rank]
            slot.size = size
            slot.rows.append(row)
            slot.num_tokens += -(-length // size)
            loads[rank] += work(length) / size
    return rounds


class BalancedSteps:
    """The micro-batches of each global batch for this data-parallel rank, as a list of slots.

    ``sizes(consumed)``: number of rows of the global batch after ``consumed`` ones; None: all are
    complete.
    """

    def __init__(
        self,
        run: RunContext,
        dataset: Any,
        consumed: int,
        sizes: Callable[[int], int] | None,
        joined: tuple[str, ...],
    ) -> None:
        self._dataset = dataset
        self._consumed = consumed
        full_size = run.batches.full_global_batch_size
        self._sizes = sizes or (lambda consumed: full_size)
        self._collate = partial(collate, joined=joined)
        self._num_ranks = run.groups.dp.size()
        self._rank = run.groups.dp.rank()
        self._config = run.config
        order = EpochOrder(len(dataset), run.config.training.seed)
        is_single = run.config.data.dataloader_type == "single"
        self._order: Any = range(len(dataset)) if is_single else order

    def __iter__(self) -> Iterator[list[tuple[int, dict[str, Any]]]]:
        m = self._config.model
        capacity = m.max_seqlen_per_dp_cp_rank
        assert capacity is not None, "a check requires it"

        def work(length: int) -> float:  # of dense layers and causal attention
            return length * (12.0 * m.hidden_size + length)

        consumed = self._consumed
        while True:
            size = self._sizes(consumed)
            try:
                rows = [self._order[i] for i in range(consumed, consumed + size)]
            except IndexError:
                return
            lengths = [row_tokens(self._dataset, row) for row in rows]
            rounds = plan_rounds(lengths, self._num_ranks, capacity, work)
            yield [self._batch(slots[self._rank], rows) for slots in rounds]
            consumed += size

    def _batch(self, slot: Slot, rows: Sequence[int]) -> tuple[int, dict[str, Any]]:
        """Return the size of the group and the complete micro-batch that it shares."""
        m = self._config.model
        unit = sequence_divisor(
            cp=slot.size, tp=m.tensor_model_parallel_size, sequence_parallel=m.sequence_parallel
        )
        if slot.size > 1:
            found = [_as_one_sequence(self._dataset[rows[slot.rows[0]]], unit)]
        else:
            found = [self._dataset[rows[i]] for i in slot.rows]
        if not found:  # a few tokens without loss
            row = self._dataset[None]
            few = {name: x[:_FEW] for name, x in row.items() if isinstance(x, Tensor)}
            found = [_as_one_sequence(few, math.lcm(_FEW, unit))]
        return slot.size, self._collate(found)


def row_tokens(dataset: Any, row: int) -> int:
    """Return the number of tokens of a row, padding included."""
    if isinstance(dataset, BlendedDataset):
        which, row = dataset.locate(row)
        return row_tokens(dataset.datasets[which], row)
    return int(dataset.trimmed_lengths[dataset.rows[row]].sum())


def _as_one_sequence(row: dict[str, Any], unit: int) -> dict[str, Any]:
    """Return a row of one sequence, which padding extends to a multiple of ``unit``."""
    missing = -len(row["tokens"]) % unit
    padded = {
        name: F.pad(x, (0, missing), value=name == "is_padding")
        for name, x in row.items()
        if isinstance(x, Tensor)
    }
    length = len(padded["tokens"])
    bounds = PackedBounds(torch.tensor([0, length], dtype=torch.int32), length)
    return {**padded, "packed_seq_params": bounds}


class BalancedRows(RerunDataIterator):
    """Iterator over the micro-batches of a global batch at a time.

    ``steps``: a `BalancedSteps`, None on ranks that receive micro-batches.
    """

    def __init__(self, run: RunContext, steps: Any) -> None:
        super().__init__(itertools.repeat(None) if steps is None else steps)
        self._tp = run.groups.tp
        self._groups = context_groups(run.groups)
        self._sizes: deque[int] = deque()
        self._batches: Iterator[dict[str, Any]] = iter(())

    def begin(self) -> int:
        """Read the next global batch; return its number of micro-batches.  Collective over tp."""
        step = super().__next__()
        found = [size for size, _ in step or ()]
        self._sizes = deque(broadcast_json(found, self._tp))
        self._batches = (batch for _, batch in step or ())
        return len(self._sizes)

    def __next__(self) -> dict[str, Any]:
        return next(self._batches)

    def use_next_group(self, model: nn.Module) -> ProcessGroupCollection:
        """Let ``model`` share the next micro-batch over the ranks of its group; return its groups.

        Without pipeline stages a pass and its backward end before the next one begins.
        """
        groups = self._groups[self._sizes.popleft()]
        use_context_groups(model, groups)
        return groups


def context_groups(groups: ProcessGroupCollection) -> dict[int, ProcessGroupCollection]:
    """Return ``groups`` with a context-parallel group of each power of two of data-parallel ranks.

    The first call creates the groups.  Collective over dp.
    """
    if groups.dp not in _made:
        ranks = dist.get_process_group_ranks(groups.dp)
        found = _made[groups.dp] = {1: groups.cp}
        size = 2
        while size <= len(ranks):
            first = groups.dp.rank() // size * size
            members = ranks[first : first + size]
            found[size] = groups.dp if members == ranks else _new_group(members)
            size *= 2
    return {size: replace(groups, cp=cp) for size, cp in _made[groups.dp].items()}


def _new_group(ranks: list[int]) -> dist.ProcessGroup:
    group: dist.ProcessGroup = dist.new_group(
        ranks, use_local_synchronization=True, group_desc="hybrid_cp"
    )
    return group
