"""Endless random order of samples that depends only on a seed."""

from __future__ import annotations

import numpy as np


class EpochOrder:
    """Numbers 0 to ``length - 1``, again in each epoch, each time in another random order.

    Element ``i`` depends only on ``length``, ``seed`` and ``i``.  The order of one epoch is in
    memory: reading within an epoch is fast, jumping between epochs is not.
    """

    def __init__(self, length: int, seed: int) -> None:
        self.length = length
        self.seed = seed
        self._epoch = -1
        self._order = np.empty(0, np.uint32)

    def __getitem__(self, i: int) -> int:
        epoch, place = divmod(i, self.length)
        return int(self.of_epoch(epoch)[place])

    def of_epoch(self, epoch: int) -> np.ndarray:
        """Return all elements of an epoch; callers must not change them."""
        if epoch != self._epoch:
            random = np.random.Generator(np.random.Philox(key=[self.seed, epoch]))
            fits = self.length <= np.iinfo(np.uint32).max
            self._order = np.arange(self.length, dtype=np.uint32 if fits else np.int64)
            random.shuffle(self._order)
            self._epoch = epoch
        return self._order
