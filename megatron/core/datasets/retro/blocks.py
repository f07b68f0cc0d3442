"""Rows in HDF5 files of a fixed number of rows, which ranks write and any process reads.

A file gets its name when it is complete, so a task that was killed continues with the blocks that
are missing, and no reader sees a part of a block.  Names are Megatron-LM's: ``0000-0100.hdf5``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron.core.config.errors import DataError
from megatron.core.optional import require


@dataclass(frozen=True)
class Ranks:
    """This process among those of the task."""

    rank: int = 0
    size: int = 1
    wait_for_all: Callable[[], None] = lambda: None  # collective

    def share(self, items: list[Any]) -> list[Any]:
        """Return every ``size``-th item, from item ``rank`` on."""
        return items[self.rank :: self.size]


ONE_PROCESS = Ranks()


@dataclass(frozen=True)
class Block:
    """Rows ``begin`` to ``end`` and their file."""

    begin: int
    end: int
    path: str


@dataclass(frozen=True)
class Blocks:
    """The files of ``num_rows`` rows in ``directory``, ``block_size`` rows each."""

    directory: str
    num_rows: int
    block_size: int

    def __iter__(self) -> Iterator[Block]:
        digits = math.ceil(math.log10(max(self.num_rows, 2))) + 1
        for begin in range(0, self.num_rows, self.block_size):
            end = min(begin + self.block_size, self.num_rows)
            name = f"{begin:0{digits}d}-{end:0{digits}d}.hdf5"
            yield Block(begin, end, os.path.join(self.directory, name))

    @property
    def missing(self) -> list[Block]:
        """The blocks that no task has completed."""
        return [block for block in self if not os.path.exists(block.path)]

    def write_missing(
        self, compute: Callable[[Block], dict[str, np.ndarray]], ranks: Ranks = ONE_PROCESS
    ) -> None:
        """Compute and write the blocks that are missing, each on one rank.  Collective."""
        missing = self.missing
        os.makedirs(self.directory, exist_ok=True)
        ranks.wait_for_all()  # before a rank adds a file that others do not count as missing
        for block in ranks.share(missing):
            arrays = compute(block)
            write_hdf5(block.path, arrays)
        ranks.wait_for_all()

    def validate(
        self,
        compute: Callable[[Block], dict[str, np.ndarray]],
        fraction: float,
        ranks: Ranks = ONE_PROCESS,
    ) -> int:
        """Compute a random ``fraction`` of the blocks again; return how many this rank compared.

        Values of floating point may differ by their rounding.  Raises DataError for a block that
        is missing or has other values.
        """
        blocks = list(self)
        count = min(len(blocks), max(1, round(fraction * len(blocks))))
        chosen = np.random.default_rng(0).permutation(len(blocks))[:count].tolist()
        mine = ranks.share([blocks[i] for i in sorted(chosen)])
        for block in mine:
            for name, expected in compute(block).items():
                found = Rows(block.path, name)[:]
                is_float = expected.dtype.kind == "f"
                if found.shape != expected.shape or not (
                    np.allclose(found, expected, rtol=1e-4, atol=1e-5)
                    if is_float
                    else np.array_equal(found, expected)
                ):
                    raise DataError(
                        f"{block.path}: {name} are not those of the project's corpora, model and "
                        "settings; remove the file and run the task again"
                    )
        return len(mine)


def write_hdf5(path: str, arrays: dict[str, np.ndarray]) -> None:
    """Write ``arrays`` completely or not at all."""
    write_rows(path, {name: (array.shape, array.dtype, [array]) for name, array in arrays.items()})


def write_rows(path: str, datasets: dict[str, tuple[tuple[int, ...], Any, Any]]) -> None:
    """Write datasets given as name -> (shape, dtype, parts) completely or not at all.

    The parts are arrays of consecutive rows, so that a file may be larger than memory.
    """
    h5py = require("h5py", "a RETRO project")
    temporary = path + ".tmp"  # a fixed name: the next run writes over what a kill left
    with h5py.File(temporary, "w") as file:
        for name, (shape, dtype, parts) in datasets.items():
            target = file.create_dataset(name, shape, dtype)
            at = 0
            for part in parts:
                target[at : at + len(part)] = part
                at += len(part)
            assert at == shape[0], f"{at} of {shape[0]} rows of {name} in {path}"
    with open(temporary, "rb") as written:
        os.fsync(written.fileno())
    os.replace(temporary, path)


class Rows:
    """The rows of one dataset of an HDF5 file.

    They are read by their place in the file, without the library: no file stays open, and processes
    that a data loader forks share nothing.
    """

    def __init__(self, path: str, name: str) -> None:
        h5py = require("h5py", "a RETRO project")
        self._path = path
        try:
            with h5py.File(path, "r") as file:
                found = file[name]
                self.shape: tuple[int, ...] = found.shape
                self._dtype: np.dtype = found.dtype
                self._offset: int | None = found.id.get_offset()
                is_plain = found.chunks is None
        except (OSError, KeyError, AttributeError) as error:
            raise self._damaged(error) from error
        if not is_plain or (self._offset is None and 0 not in self.shape):
            raise self._damaged(f"{name} is not stored contiguously")

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> np.ndarray:
        begin, end, _ = rows.indices(len(self))
        shape = (max(end - begin, 0), *self.shape[1:])
        if 0 in shape:
            return np.empty(shape, self._dtype)
        assert self._offset is not None, "a dataset with rows"
        row_bytes = self._dtype.itemsize * math.prod(self.shape[1:])
        try:
            found = np.fromfile(
                self._path, self._dtype, math.prod(shape), offset=self._offset + begin * row_bytes
            )
            return found.reshape(shape)
        except (OSError, ValueError) as error:
            raise self._damaged(error) from error

    def _damaged(self, reason: object) -> DataError:
        return DataError(
            f"{self._path} is missing or damaged ({reason}): remove it and run its task of "
            "tools/retro/preprocess_data.py again"
        )
