"""Pack several samples of images and text into one row.

The rows of an epoch hold its samples in their random order: a row ends where the next sample does
not fit.  The plan needs the length of every sample, and depends on lengths, limits and seed only.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megatron.core.config.errors import DataError
from megatron.core.datasets.epoch_order import EpochOrder
from megatron.core.datasets.megatron_dataset import Sample

_JOINED = ("images", "image_sizes")


class RowPlan:
    """Numbers of the samples of each row, for any number of epochs.

    ``lengths`` i64 [n, 2]: tokens and positions of each sample, 0 for one that cannot be used;
    ``limits``: those of a row, which every sample fits.  Raises DataError without a usable sample.
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
        self._samples = np.empty(0, np.int64)  # of this epoch, in order
        self._starts = np.empty(0, np.int64)  # of its rows

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


def packed(samples: Sequence[Sample], num_tokens: int, pad: int) -> Sample:
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
        row[name] = torch.cat([*parts, _filled(parts[0], rest, value)])
    row["position_ids"] = torch.cat([torch.arange(length) for length in (*texts, rest)])
    for name in _JOINED:
        if name in samples[0]:
            row[name] = torch.cat([sample[name] for sample in samples])
    return row


def _filled(like: Tensor, length: int, value: int) -> Tensor:
    return torch.full((length,), value, dtype=like.dtype)
