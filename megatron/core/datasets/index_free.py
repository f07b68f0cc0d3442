"""Random orders without index arrays: what a sample reads is computed when it is read.

Opening data of any size costs the same, no rank waits for another one's index, and sample ``i``
depends on the data, the seed and ``i`` alone, not on the number of samples that a run asks for.

- `DocumentOrder` shuffles the documents of one source in each epoch, cuts their tokens into samples
  and shuffles the samples.
- `BlendOrder` says from which source sample ``i`` of a blend comes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np

from megatron.core.config.errors import DataError
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import EpochOrder

Piece = tuple[int, int, int]  # sequence, first token, number of tokens

_ROUNDS = 4  # of a Feistel network; four make a strong pseudo-random permutation
_BLOCK = 2048  # sequences that are shuffled among themselves
_64_BITS = (1 << 64) - 1
_GOLDEN_RATIO = (math.sqrt(5) - 1) / 2
_ENDLESS = (1 << 61) - 1  # period of a blend whose number of samples may grow


class Permutation:
    """Random order of the numbers 0 to ``length - 1``, of which any element is computed alone.

    A Feistel network permutes the numbers below a power of four, and numbers that are not below
    ``length`` are permuted again until they are (cycle walking: Black and Rogaway, Ciphers with
    Arbitrary Finite Domains, 2002): at most four times on average.  Equal ``key``: equal order.
    """

    def __init__(self, length: int, key: Sequence[int]) -> None:
        self.length = length
        self._half_bits = max(1, -(-(length - 1).bit_length() // 2))
        words = np.random.SeedSequence(key).generate_state(_ROUNDS, np.uint64)
        self._round_keys: list[int] = words.tolist()

    def __getitem__(self, i: int) -> int:
        if not 0 <= i < self.length:
            raise IndexError(f"element {i} of {self.length}")
        half = self._half_bits
        mask = (1 << half) - 1
        while True:
            left = i >> half
            right = i & mask
            for key in self._round_keys:
                left, right = right, left ^ (_mixed(right ^ key) & mask)
            i = left << half | right
            if i < self.length:
                return i


def _mixed(bits: int) -> int:
    """Return 64 bits that depend on all ``bits`` (the finalizer of SplitMix64)."""
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 & _64_BITS
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EB & _64_BITS
    return bits ^ bits >> 31


class DocumentOrder:
    """Samples of the sequences [begin, end) of an indexed dataset, in a new order in each epoch.

    In an epoch, blocks of neighboring sequences are shuffled, and the sequences within each block;
    the tokens in this order are cut into samples of ``length + extra`` tokens, of which neighbors
    share ``extra``; then the samples are shuffled over the complete epoch.  So a sample mixes
    sequences of a block, and consecutive samples come from anywhere.  Tokens behind the last
    complete sample of an epoch are not used in it, unless ``keeps_rest``.

    Memory: about 20 bytes a block, once the first sample has been read.  The .idx file is read
    where a sample needs it, and checked there.
    """

    def __init__(
        self,
        source: IndexedDataset,
        begin: int,
        end: int,
        *,
        length: int,
        extra: int,
        seed: int,
        keeps_rest: bool = False,
    ) -> None:
        self._source = source
        self._begin = begin
        self._end = end
        self._length = length
        self._extra = extra
        self._seed = seed
        edges = self._starts(np.array([begin, end]))
        self.tokens_per_epoch = int(edges[1] - edges[0])
        available = max(0, self.tokens_per_epoch - extra)
        self.samples_per_epoch = -(-available // length) if keeps_rest else available // length
        self._blocks = EpochOrder(-(-(end - begin) // _BLOCK), seed)
        self._sizes: np.ndarray | None = None  # i64[blocks]: tokens of each block, once read
        self._epoch = -1
        self._ends = np.empty(0, np.int64)  # of the shuffled blocks, in tokens of the epoch
        self._samples = Permutation(1, [0])
        self._last: tuple[int, np.ndarray, np.ndarray] | None = None  # a block's place, see _block

    def pieces(self, i: int) -> Iterator[Piece]:
        """Yield the parts of sequences that sample ``i`` consists of.  Raises DataError."""
        epoch, place = divmod(i, self.samples_per_epoch)
        if epoch != self._epoch:
            self._begin_epoch(epoch)
        start = self._samples[place] * self._length
        stop = min(start + self._length + self._extra, self.tokens_per_epoch)
        at = int(np.searchsorted(self._ends, start, "right"))
        while start < stop:
            block_start = int(self._ends[at - 1]) if at else 0
            sequences, ends = self._block(at)
            first = int(np.searchsorted(ends, start - block_start, "right"))
            for sequence, end in zip(sequences[first:], ends[first:], strict=True):
                begin = block_start + int(ends[first - 1]) if first else block_start
                count = min(block_start + int(end), stop) - start
                if count > 0:
                    yield int(sequence), start - begin, count
                    start += count
                first += 1
                if start >= stop:
                    return
            at += 1

    def _begin_epoch(self, epoch: int) -> None:
        if self._sizes is None:
            edges = np.arange(self._begin, self._end, _BLOCK)
            self._sizes = np.diff(self._starts(np.append(edges, self._end)))
            if (self._sizes < 0).any():
                raise self._damaged("its sequences overlap in .bin")
        self._epoch = epoch
        self._ends = np.cumsum(self._sizes[self._blocks.of_epoch(epoch)])
        self._samples = Permutation(self.samples_per_epoch, [self._seed, epoch])
        self._last = None

    def _block(self, at: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the shuffled sequences of the block at place ``at``, and where each one ends.

        The ends are i64, in tokens from the start of the block.
        """
        if self._last is not None and self._last[0] == at:
            return self._last[1:]
        block = int(self._blocks.of_epoch(self._epoch)[at])
        first = self._begin + block * _BLOCK
        lengths = self._source.sequence_lengths[first : min(first + _BLOCK, self._end)]
        random = np.random.Generator(
            np.random.Philox(key=[self._seed, self._epoch], counter=[0, 0, 0, block + 1])
        )
        order = random.permutation(len(lengths))
        ends = np.cumsum(lengths[order], dtype=np.int64)
        assert self._sizes is not None
        if (lengths < 0).any() or int(ends[-1]) != int(self._sizes[block]):
            raise self._damaged(
                f"the lengths of sequences {first} to {first + len(lengths)} do not match their "
                "places in .bin"
            )
        self._last = at, first + order, ends
        return self._last[1:]

    def _starts(self, sequences: np.ndarray) -> np.ndarray:
        """Return where sequences start in .bin, in tokens; the number of all is its end."""
        index = self._source.index
        index.check_not_cut()
        count = len(index)
        if not count:
            return np.zeros(len(sequences), np.int64)
        pointers = index.sequence_pointers[np.minimum(sequences, count - 1)]
        starts: np.ndarray = pointers // index.dtype_size
        return starts + np.where(sequences == count, int(index.sequence_lengths[-1]), 0)

    def _damaged(self, what: str) -> DataError:
        return DataError(
            f"{self._source.index.idx_path} is damaged: {what}; copy it again or preprocess again, "
            "or train without --index-free"
        )


class BlendOrder:
    """Source of each sample of a blend, in proportion to ``weights``, without an array.

    Position ``i`` lies at ``i`` times the golden ratio on a circle of which each source owns an
    arc; so the samples of each source lie evenly.  Among the first ``n`` samples a source has its
    share of ``n`` but for a few samples (about log n); after each ``period`` of samples exactly,
    rounded to one sample.  Without ``period`` the order does not depend on the number of samples.
    """

    def __init__(self, weights: Sequence[float] | Sequence[int], period: int | None = None) -> None:
        self._period = period = period or _ENDLESS
        step = max(1, round(period * _GOLDEN_RATIO))
        while math.gcd(step, period) > 1:
            step += 1
        self._step = step
        if all(isinstance(weight, int) for weight in weights):
            shares = [int(weight) for weight in weights]
        else:
            shares = [int(weight / max(weights) * 2**52) for weight in weights]
        total = sum(shares)
        # Where the arc of each source ends, in a circle of ``period`` points.
        self._ends = [(2 * end * period + total) // (2 * total) for end in accumulate(shares)]

    def __getitem__(self, i: int) -> tuple[int, int]:
        """Return the source of sample ``i`` and how many earlier samples come from it."""
        point = i * self._step % self._period
        low = 0
        high = len(self._ends) - 1
        while low < high:
            middle = (low + high) // 2
            if point < self._ends[middle]:
                high = middle
            else:
                low = middle + 1
        begin = self._ends[low - 1] if low else 0
        return low, self._before(i, self._ends[low]) - self._before(i, begin)

    def count(self, source: int, size: int) -> int:
        """Return how many of the first ``size`` samples come from ``source``."""
        begin = self._ends[source - 1] if source else 0
        return self._before(size, self._ends[source]) - self._before(size, begin)

    def _before(self, size: int, end: int) -> int:
        """Return how many of the first ``size`` points lie below ``end``, plus a constant."""
        # point < end exactly if floor(x / period) - floor((x - end) / period) is 1, x = i * step.
        return size - _floor_sum(size, self._period, self._step, self._period - end)


def _floor_sum(n: int, m: int, a: int, b: int) -> int:
    """Return the sum of floor((a i + b) / m) for i from 0 to n - 1; a, b >= 0.

    Euclid's algorithm on a and m: counts the lattice points below a line, in O(log m) steps.
    """
    total = 0
    while n > 0:
        total += (n - 1) * n // 2 * (a // m) + n * (b // m)
        a, b = a % m, b % m
        top = a * n + b
        if top < m:
            break
        n, b = divmod(top, m)
        m, a = a, m
    return total
