"""Splits, weights, blends given on the command line, and random orders."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from enum import Enum

import numpy as np

from megatron.core.config.errors import ConfigError

logger = logging.getLogger(__name__)

# path prefixes and their weights, or None for no weights
Blend = tuple[list[str], list[float] | None]


class Split(Enum):
    """The three splits of the data; the value is the index in lists like [train, valid, test]."""

    train = 0
    valid = 1
    test = 2


def compile_helpers() -> None:
    """Do nothing: installation compiles the helper, and without it numpy is used."""
    logger.info("the dataset helper is compiled at installation, there is nothing to compile now")


def normalize(weights: Sequence[float]) -> list[float]:
    """Return ``weights`` divided by their sum."""
    array = np.array(weights, dtype=np.float64)
    return [float(share) for share in array / np.sum(array)]


def get_blend_from_list(blend: Sequence[str] | None) -> Blend | None:
    """Parse ``w1 p1 w2 p2 ...`` or ``p1 p2 ...`` into (prefixes, weights or None).

    All words are prefixes if their number is odd, or if no word at a weight position is a number.
    Raises ConfigError if only some of these words are numbers.
    """
    if not blend:
        return None
    words = [str(word) for word in blend]
    if len(words) % 2 == 1:
        return words, None
    weights = [_number(word) for word in words[::2]]
    known = [weight for weight in weights if weight is not None]
    if not known:
        return words, None
    if len(known) != len(weights):
        wrong = words[::2][weights.index(None)]
        raise ConfigError(
            f"data paths are given as weight and prefix in turn, but {wrong!r} stands where a "
            "weight is expected: give every prefix a weight, or none of them"
        )
    return words[1::2], known


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


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
