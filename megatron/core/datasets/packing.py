"""Pack samples into rows: documents, conversations, and samples of images and text.

Row ``i`` depends only on the lengths, the capacity, the seed and ``i``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from megatron.core.config.errors import DataError
from megatron.core.datasets.index_free import Piece
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.megatron_dataset import Sample
from megatron.core.datasets.utils import EpochOrder

_JOINED = ("images", "image_sizes")


@dataclass(eq=False)
class PackedEpochs:
    """Endless rows of at most ``capacity`` tokens; an epoch contains each conversation once.

    Packed first-fit-decreasing, in another random order in each epoch.

    ``lengths`` [n]: tokens of each conversation; length 0 leaves it out.
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
        return len(self._pack(np.flatnonzero(self.lengths)))

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
            rows = self._pack(used)
            order = np.arange(len(rows))
            random.shuffle(order)
            self._rows = [rows[j] for j in order]
            self._epoch = epoch
        return self._rows[place]

    def _pack(self, numbers: np.ndarray) -> list[np.ndarray]:
        if not self.packs:
            return np.split(numbers, len(numbers)) if len(numbers) else []
        return [numbers[row] for row in first_fit_decreasing(self.lengths[numbers], self.capacity)]


class PackedDocuments:
    """Samples of complete sequences [begin, end) of an indexed dataset; no sequence is cut.

    A sequence longer than ``capacity`` tokens becomes several pieces, of which each counts as one.
    Each piece occurs once in an epoch.  Memory: about 20 bytes a piece.
    """

    def __init__(
        self, source: IndexedDataset, begin: int, end: int, *, capacity: int, seed: int
    ) -> None:
        lengths = source.sequence_lengths[begin:end].astype(np.int64)
        counts = -(-lengths // capacity)
        self._sequences = np.repeat(np.arange(begin, end), counts)
        before = np.cumsum(counts) - counts
        self._offsets = (np.arange(len(self._sequences)) - np.repeat(before, counts)) * capacity
        rest = np.repeat(lengths, counts) - self._offsets
        self._epochs = PackedEpochs(np.minimum(rest, capacity), capacity, seed)
        self.tokens_per_epoch = int(lengths.sum())

    @property
    def samples_per_epoch(self) -> int:
        """Number of samples of an epoch."""
        return self._epochs.rows_per_epoch

    @property
    def fill(self) -> float:
        """Share of the positions that hold tokens."""
        return self._epochs.fill

    def pieces(self, i: int) -> Iterator[Piece]:
        """Yield the parts of sequences that sample ``i`` consists of."""
        for piece in self._epochs[i].tolist():
            offset = int(self._offsets[piece])
            yield int(self._sequences[piece]), offset, int(self._epochs.lengths[piece])


def first_fit_decreasing(lengths: np.ndarray, capacity: int) -> list[np.ndarray]:
    """Return the items of each bin: the longest first, each in the first bin with room for it.

    Items of equal length keep their order.  All items of one length are placed at once, in time
    proportional to the number of bins that still have room.
    """
    order = np.argsort(-lengths.astype(np.int64), kind="stable")
    sizes, firsts, counts = np.unique(-lengths[order], return_index=True, return_counts=True)
    bin_of = np.empty(len(lengths), np.int64)
    room = np.empty(0, np.int64)  # free space of each open bin
    names = np.empty(0, np.int64)  # their numbers, rising
    num_bins = 0
    for size, first, count in zip((-sizes).tolist(), firsts, counts.tolist(), strict=True):
        fits = room // size
        before = np.cumsum(fits) - fits
        taken = np.clip(count - before, 0, fits)
        left = count - int(taken.sum())
        new = np.diff(np.arange(0, left, capacity // size), append=left)
        names = np.append(names, np.arange(num_bins, num_bins + len(new)))
        room = np.append(room, np.full(len(new), capacity))
        taken = np.append(taken, new)
        num_bins += len(new)
        bin_of[order[first : first + count]] = np.repeat(names, taken)
        room = room - size * taken
        is_open = room >= -sizes[-1]  # the shortest item
        names = names[is_open]
        room = room[is_open]
    by_bin = order[np.argsort(bin_of[order], kind="stable")]
    ends = np.cumsum(np.bincount(bin_of, minlength=num_bins))
    return np.split(by_bin, ends[:-1]) if num_bins else []


class RowPlan:
    """Numbers of the samples of each row, for any number of epochs.

    The rows of an epoch hold its samples in their random order: a row ends where the next sample
    does not fit.

    ``lengths`` i64 [n, 2]: tokens and positions of each sample; 0 leaves a sample out.
    ``limits``: largest numbers of tokens and of positions of a row; no sample may exceed them.
    Raises DataError if all samples are left out.
    """

    def __init__(self, lengths: np.ndarray, limits: tuple[int, int], seed: int) -> None:
        self._usable = np.flatnonzero((lengths > 0).all(1))
        if not len(self._usable):
            raise DataError("no sample can be used: the log names the reasons")
        self._lengths = lengths[self._usable]
        self._limits = limits
        self._order = EpochOrder(len(self._usable), seed)
        self._ends: list[int] = []  # rows up to the end of each epoch seen so far
        self._epoch = -1
        self._samples = np.empty(0, np.int64)  # numbers of the current epoch's samples, in order
        self._starts = np.empty(0, np.int64)  # index of each row's first sample

    def num_rows(self, epoch: int) -> int:
        """Return the number of rows of an epoch."""
        self._plan(epoch)
        return len(self._starts) - 1

    def __getitem__(self, row: int) -> list[int]:
        """Return the numbers of the samples of ``row``."""
        while not self._ends or self._ends[-1] <= row:
            epoch = len(self._ends)
            before = self._ends[-1] if self._ends else 0
            self._ends.append(before + self.num_rows(epoch))
        epoch = bisect_right(self._ends, row)
        self._plan(epoch)
        place = row - (self._ends[epoch - 1] if epoch else 0)
        first, end = self._starts[place : place + 2]
        found: list[int] = self._samples[first:end].tolist()
        return found

    def _plan(self, epoch: int) -> None:
        if epoch == self._epoch:
            return
        order = self._order.of_epoch(epoch)
        sums = np.concatenate([np.zeros((1, 2), np.int64), self._lengths[order].cumsum(0)])
        starts = [0]
        while starts[-1] < len(order):
            most = sums[starts[-1]] + self._limits
            ends = (int(np.searchsorted(sums[:, i], most[i], side="right")) - 1 for i in range(2))
            starts.append(min(ends))
        self._epoch = epoch
        self._samples = self._usable[order]
        self._starts = np.array(starts)


def pack_samples(samples: Sequence[Sample], num_tokens: int, pad: int) -> Sample:
    """Return one row of ``num_tokens`` tokens with the texts and images of ``samples``.

    The padding behind each text, where num_tiles is -1, is left out.  ``position_ids`` begin at 0
    at each sample, and at the padding behind the last.
    """
    texts = [int((sample["num_tiles"] >= 0).sum()) for sample in samples]
    rest = num_tokens - sum(texts)
    assert rest >= 0, f"{sum(texts)} tokens do not fit a row of {num_tokens}"
    behind = {"tokens": pad, "labels": pad, "loss_mask": 0, "num_tiles": -1}
    row: Sample = {}
    for name, value in behind.items():
        parts = [sample[name][:end] for sample, end in zip(samples, texts, strict=True)]
        row[name] = torch.cat([*parts, parts[0].new_full((rest,), value)])
    row["position_ids"] = torch.cat([torch.arange(length) for length in (*texts, rest)])
    for name in _JOINED:
        if name in samples[0]:
            row[name] = torch.cat([sample[name] for sample in samples])
    return row
