"""Pack conversations into rows: first-fit-decreasing, in another random order in each epoch.

Row ``i`` depends only on the lengths, the capacity, the seed and ``i``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(eq=False)
class PackedEpochs:
    """Endless rows of at most ``capacity`` tokens; an epoch contains each conversation once.

    ``lengths`` [n]: tokens of each conversation; those of length 0 are in no row.
    ``packs=False``: each row is one conversation.  The rows of one epoch are in memory.
    """

    lengths: np.ndarray
    capacity: int
    seed: int
    packs: bool = True

    def __post_init__(self) -> None:
        assert self.lengths.max(initial=0) <= self.capacity, "a conversation fits into a row"
        self._epoch = -1
        self._rows: list[np.ndarray] = []

    @cached_property
    def rows_per_epoch(self) -> int:
        """Number of rows of an epoch; it follows from the lengths, so all epochs have the same."""
        return len(self._packed(np.flatnonzero(self.lengths)))

    @property
    def fill(self) -> float:
        """Share of the positions of an epoch's rows that hold tokens."""
        places = self.rows_per_epoch * self.capacity
        return float(self.lengths.sum(dtype=np.int64)) / places if places else 0.0

    def __getitem__(self, i: int) -> np.ndarray:
        """Return the numbers of the conversations in row ``i``."""
        epoch, place = divmod(i, self.rows_per_epoch)
        if epoch != self._epoch:
            random = np.random.Generator(np.random.Philox(key=[self.seed, epoch]))
            used = np.flatnonzero(self.lengths)
            random.shuffle(used)  # conversations of equal length change places
            rows = self._packed(used)
            order = np.arange(len(rows))
            random.shuffle(order)
            self._rows = [rows[j] for j in order]
            self._epoch = epoch
        return self._rows[place]

    def _packed(self, numbers: np.ndarray) -> list[np.ndarray]:
        if not self.packs:
            return np.split(numbers, len(numbers)) if len(numbers) else []
        return [numbers[row] for row in first_fit_decreasing(self.lengths[numbers], self.capacity)]


def first_fit_decreasing(lengths: np.ndarray, capacity: int) -> list[np.ndarray]:
    """Return the items of each bin: the longest first, each in the first bin with room for it.

    Items of equal length keep their order.  All items of one length are placed at once, in time
    proportional to the number of bins that still have room.
    """
    order = np.argsort(-lengths.astype(np.int64), kind="stable")
    sizes, firsts, counts = np.unique(-lengths[order], return_index=True, return_counts=True)
    bin_of = np.empty(len(lengths), np.int64)
    room = np.empty(0, np.int64)  # of the open bins
    names = np.empty(0, np.int64)  # their numbers, rising
    num_bins = 0
    for size, first, count in zip((-sizes).tolist(), firsts, counts.tolist(), strict=True):
        fits = room // size
        before = np.cumsum(fits) - fits
        taken = np.clip(count - before, 0, fits)
        left = count - int(taken.sum())
        per_bin = capacity // size
        new = np.full(-(-left // per_bin), per_bin)
        if left % per_bin:
            new[-1] = left % per_bin
        names = np.concatenate((names, np.arange(num_bins, num_bins + len(new))))
        room = np.concatenate((room, np.full(len(new), capacity)))
        taken = np.concatenate((taken, new))
        num_bins += len(new)
        bin_of[order[first : first + count]] = np.repeat(names, taken)
        room = room - size * taken
        is_open = room >= -sizes[-1]  # the shortest item
        names = names[is_open]
        room = room[is_open]
    by_bin = order[np.argsort(bin_of[order], kind="stable")]
    ends = np.cumsum(np.bincount(bin_of, minlength=num_bins))
    return np.split(by_bin, ends[:-1]) if num_bins else []
