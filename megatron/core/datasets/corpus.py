"""Text corpora that a process tokenizes while training reads them: .bin/.idx files in shards.

`megatron.training.preprocess.corpus` writes the shards ``00000``, ``00001``, ... of a directory
and, after each, ``corpus.json``.  A shard is final once it is named there, so the order of samples
is the same while the corpus grows as it is when it is complete:

- in the first epoch the shards follow one another, and the documents and samples of each are
  shuffled (`DocumentOrder`);
- later epochs shuffle the shards too.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import lru_cache, partial
from typing import Any

import numpy as np

from megatron.core.config.errors import DataError
from megatron.core.datasets.index_cache import write_atomically
from megatron.core.datasets.index_free import DocumentOrder, Piece
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import EpochOrder

_POLL_S = 0.2
_SILENCE_S = 120.0  # without a sign of the tokenizing process: it is gone
_OPEN_SHARDS = 32
_SEQUENCE_BITS = 32  # lower bits of a sequence's number; the upper ones are its shard's number


@dataclass
class CorpusProgress:
    """Content of ``corpus.json``: which shards are finished, and where the next one begins."""

    key: dict[str, Any] = field(default_factory=dict)  # input files and all that decides the tokens
    num_sequences: list[int] = field(default_factory=list)  # of each finished shard
    num_documents: int = 0
    next_block: int = 0  # first block of the input that is in no finished shard
    bad_lines: list[str] = field(default_factory=list)  # the first ones, with their reasons
    num_bad_lines: int = 0
    is_complete: bool = False
    error: str | None = None  # that ended the tokenizing process
    error_at_s: float = 0.0  # time.time()

    @classmethod
    def read(cls, directory: str) -> CorpusProgress | None:
        """Return the content of a directory; None without one.  Raises DataError if damaged."""
        path = progress_path(directory)
        try:
            with open(path, encoding="utf-8") as file:
                return cls(**json.load(file))
        except FileNotFoundError:
            return None
        except (OSError, TypeError, ValueError) as error:
            raise DataError(f"{path} is damaged ({error}): remove {directory}") from error

    def write(self, directory: str) -> None:
        """Write the file atomically."""
        content = json.dumps(asdict(self)).encode()
        write_atomically(progress_path(directory), lambda file: file.write(content))


def progress_path(directory: str) -> str:
    """Return the path of the record of what is finished."""
    return os.path.join(directory, "corpus.json")


def shard_prefix(directory: str, number: int) -> str:
    """Return the path prefix of a shard's .bin and .idx."""
    return os.path.join(directory, f"{number:05d}")


def alive_path(directory: str) -> str:
    """Return the file that the tokenizing process touches while it works."""
    return os.path.join(directory, "alive")


class Corpus:
    """Sequences of a corpus that may still grow; a number holds a shard and a place in it.

    ``settings``: keyword arguments of the `IndexedDataset` of each shard.
    """

    def __init__(self, directory: str, path: str, **settings: Any) -> None:
        self.directory = directory
        self.path = path  # as the user named it
        self._settings = settings
        self._progress = CorpusProgress()
        self._opened_at_s = time.time()
        self._open = lru_cache(_OPEN_SHARDS)(self._open_shard)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), **self._settings), (self.directory, self.path)

    def shard(self, number: int) -> IndexedDataset | None:
        """Return a shard, or None if the corpus has fewer; waits until this is known.

        Raises DataError if the process that tokenizes has failed or is gone.
        """
        waiting_since_s = time.monotonic()
        while number >= len(self._progress.num_sequences):
            if self._progress.is_complete:
                return None
            self._progress = CorpusProgress.read(self.directory) or CorpusProgress()
            # An older error is of an earlier run; the process of this run removes it.
            if (error := self._progress.error) and self._progress.error_at_s > self._opened_at_s:
                raise DataError(f"--data-path {self.path} cannot be tokenized: {error}")
            if number < len(self._progress.num_sequences) or self._progress.is_complete:
                continue
            if time.monotonic() - max(waiting_since_s, self._alive_at_s()) > _SILENCE_S:
                raise DataError(
                    f"--data-path {self.path}: no process tokenizes it any more; see log.txt in "
                    f"{self.directory}, or beside the shards of the first text of --data-path, and "
                    "start the run again, which continues where it ended"
                )
            time.sleep(_POLL_S)
        return self._open(number)

    def is_complete(self) -> bool:
        """Return whether all shards are written; waits for the first one, and a small rest."""
        self.shard(0)
        if not self._progress.is_complete:
            time.sleep(_POLL_S)
            self._progress = CorpusProgress.read(self.directory) or self._progress
        return self._progress.is_complete

    def _alive_at_s(self) -> float:
        """Return when the tokenizing process last gave a sign, on the clock of `monotonic`."""
        try:
            return time.monotonic() - (time.time() - os.path.getmtime(alive_path(self.directory)))
        except FileNotFoundError:
            return 0.0

    def get(self, number: int, offset: int, length: int | None) -> np.ndarray:
        """Return tokens of a sequence, as `IndexedDataset.get` does."""
        shard = self._open(number >> _SEQUENCE_BITS)
        tokens: np.ndarray = shard.get(number & (1 << _SEQUENCE_BITS) - 1, offset, length)
        return tokens

    def _open_shard(self, number: int) -> IndexedDataset:
        return IndexedDataset(shard_prefix(self.directory, number), **self._settings)


class CorpusOrder:
    """Samples of a part of every shard of a corpus; see the module.

    ``fractions``: begin and end of the part, as --split divides the sequences of each shard.
    ``settings``: keyword arguments of `DocumentOrder`.
    """

    def __init__(
        self, corpus: Corpus, fractions: tuple[float, float], settings: dict[str, Any]
    ) -> None:
        self._corpus = corpus
        self._fractions = fractions
        self._settings = settings
        self._ends: list[int] = []  # of each shard in the first epoch, in samples
        self._epoch = 0
        self._shards = np.empty(0, np.int64)  # order of the shards in a later epoch
        self._shard_ends = np.empty(0, np.int64)  # and their ends, in samples
        self._order = lru_cache(_OPEN_SHARDS)(self._order_of)

    def __reduce__(self) -> tuple[type[CorpusOrder], tuple[object, ...]]:
        return type(self), (self._corpus, self._fractions, self._settings)

    @property
    def samples_per_epoch(self) -> int:
        """Number of samples of an epoch; waits until the corpus is complete."""
        while self._add_shard():
            pass
        return self._ends[-1] if self._ends else 0

    def pieces(self, i: int) -> Iterator[Piece]:
        """Yield the parts of sequences that sample ``i`` consists of.

        Waits for the shard of the sample.  Raises DataError if there will be none.
        """
        while not self._ends or i >= self._ends[-1]:
            if not self._add_shard():
                break
        if self._ends and i < self._ends[-1]:
            place = int(np.searchsorted(self._ends, i, "right"))
            return self._of_shard(place, i - (self._ends[place - 1] if place else 0), 0)
        total = self.samples_per_epoch
        if not total:
            begin, end = self._fractions
            raise DataError(
                f"--data-path {self._corpus.path} has no shard with the tokens of one sample "
                f"between {begin:g} and {end:g} of its documents: give it more data or a larger "
                "share in --split, or do not use this part (--eval-iters 0)"
            )
        epoch, rest = divmod(i, total)
        if epoch != self._epoch:
            counts = np.diff(self._ends, prepend=0)
            self._shards = EpochOrder(len(counts), self._settings["seed"]).of_epoch(epoch)
            self._shard_ends = np.cumsum(counts[self._shards])
            self._epoch = epoch
        place = int(np.searchsorted(self._shard_ends, rest, "right"))
        begin = int(self._shard_ends[place - 1]) if place else 0
        return self._of_shard(int(self._shards[place]), rest - begin, epoch)

    def _of_shard(self, shard: int, sample: int, epoch: int) -> Iterator[Piece]:
        order = self._order(shard)
        for sequence, offset, length in order.pieces(epoch * order.samples_per_epoch + sample):
            yield shard << _SEQUENCE_BITS | sequence, offset, length

    def _add_shard(self) -> bool:
        """Count the samples of the next shard; return False if there is none."""
        number = len(self._ends)
        if self._corpus.shard(number) is None:
            return False
        before = self._ends[-1] if self._ends else 0
        self._ends.append(before + self._order(number).samples_per_epoch)
        return True

    def _order_of(self, number: int) -> DocumentOrder:
        shard = self._corpus.shard(number)
        assert shard is not None, f"shard {number} is counted"
        begin, end = (round(fraction * len(shard)) for fraction in self._fractions)
        seed = self._settings["seed"]
        return DocumentOrder(shard, begin, end, **{**self._settings, "seed": seed + number})
