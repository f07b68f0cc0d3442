"""A folder with the most probable tokens of a teacher for each training sample.

Files::

    store.json                                 `StoreSettings`; written first
    steps_00000001-00000004_00000.safetensors  samples of steps 1 to 4 of data-parallel rank 0

A file has ``n`` samples of ``s`` tokens, and ``e`` entries in all::

    index      [n] int64     index of the sample in the training set
    checksum   [n] int64     crc32 of its tokens and labels, so that other data is refused
    damage     [n] int64     crc32 of its ids and log_probs
    counts     [n, s] int32  entries of each token
    ids        [e] int32     tokens in descending order of probability, sample by sample
    log_probs  [e]           their log-probabilities, in --logits-save-dtype

A file is written under another name, synchronized with the disk and renamed: a killed run leaves
complete files only, and the next one continues after them.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron.core.config.errors import CheckpointError, DataError
from megatron.core.dist_checkpointing.manifest import fsync_folder
from megatron.core.dist_checkpointing.safetensors_file import (
    LazyTensor,
    TensorEntry,
    bytes_of,
    read_header,
    write_file,
)
from megatron.core.text_files import read_text

SETTINGS = "store.json"
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
_TENSORS = {"index", "checksum", "damage", "counts", "ids", "log_probs"}


@dataclass(frozen=True)
class StoreSettings:
    """What all files of a store have in common."""

    vocab_size: int
    seq_length: int
    top_k: int  # entries of a token, at most
    dtype: str


class StoredRows(NamedTuple):
    """Entries of samples: sample keys [n], ids and log-probabilities [n, s, k], -inf for none."""

    sample: Tensor
    checksum: Tensor
    ids: Tensor
    log_probs: Tensor


def checksum_of(sample: Mapping[str, Any]) -> int:
    """Return the crc32 of the tokens and labels of a sample."""
    rows = [np.asarray(sample[name], dtype=np.int64).tobytes() for name in ("tokens", "labels")]
    return zlib.crc32(b"".join(rows))


def prepare_store(folder: Path, settings: StoreSettings) -> None:
    """Create the store, or raise DataError if ``folder`` has one with other settings."""
    path = folder / SETTINGS
    folder.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        temporary = folder / f"{SETTINGS}.tmp"
        temporary.write_text(json.dumps(asdict(settings)), encoding="utf-8")
        temporary.replace(path)
    found = read_settings(folder, "--logits-save-dir")
    if found != settings:
        raise DataError(
            f"--logits-save-dir {folder} has {asdict(found)}, this run would save "
            f"{asdict(settings)}: choose another folder"
        )


def read_settings(folder: str | os.PathLike[str], flag: str) -> StoreSettings:
    """Return the settings of the store in ``folder``.  Raises DataError if it has none."""
    what = f"{flag} {folder}: {SETTINGS}"
    text = read_text(Path(folder) / SETTINGS, what, DataError, "a folder of --logits-save-dir")
    try:
        found = StoreSettings(**json.loads(text))
        sizes = found.vocab_size, found.seq_length, found.top_k
        is_valid = found.dtype in _DTYPES and all(type(n) is int and n > 0 for n in sizes)
    except (ValueError, TypeError):
        is_valid = False
    if not is_valid:
        raise DataError(f"{what} is damaged: {text[:200]!r}; save the store again")
    return found


def write_rows(
    folder: Path, rows: list[StoredRows], dtype: str, steps: tuple[int, int], rank: int
) -> None:
    """Write one file with the ``rows`` of ``rank`` from the first to the last of ``steps``."""
    given = [x.log_probs > float("-inf") for x in rows]
    counts = torch.cat([x.sum(-1) for x in given]).int()
    ids = torch.cat([x.ids[mask] for x, mask in zip(rows, given, strict=True)]).int()
    log_probs = torch.cat([x.log_probs[mask] for x, mask in zip(rows, given, strict=True)])
    log_probs = log_probs.to(_DTYPES[dtype])
    sizes = counts.sum(1).tolist()
    damage = [
        zlib.crc32(bytes_of(b), zlib.crc32(bytes_of(a)))
        for a, b in zip(ids.split(sizes), log_probs.split(sizes), strict=True)
    ]
    tensors = {
        "index": torch.cat([x.sample for x in rows]),
        "checksum": torch.cat([x.checksum for x in rows]),
        "damage": torch.tensor(damage, dtype=torch.int64),
        "counts": counts,
        "ids": ids,
        "log_probs": log_probs,
    }
    path = folder / f"steps_{steps[0]:08d}-{steps[1]:08d}_{rank:05d}.safetensors"
    temporary = path.with_suffix(".tmp")
    lazy = [LazyTensor(name, x.dtype, tuple(x.shape), x.detach) for name, x in tensors.items()]
    write_file(temporary, lazy, {}, steps[1])
    temporary.replace(path)
    fsync_folder(folder)


class LogitsStore:
    """Reader of a store: the entries of any sample."""

    def __init__(self, folder: str, flag: str = "--logits-load-dir") -> None:
        """Read the sample keys of all files.  Raises DataError for a file that is damaged."""
        settings = read_settings(folder, flag)
        paths = sorted(Path(folder).glob("steps_*.safetensors"))
        self.files = [StoreFile(path, settings) for path in paths]
        # Of two files with one sample, the later.
        self._places = {
            index: (file, row)
            for file in self.files
            for row, index in enumerate(file.read("index").tolist())
        }

    def __contains__(self, index: int) -> bool:
        return index in self._places

    def __len__(self) -> int:
        return len(self._places)

    def entries(self, index: int, checksum: int) -> tuple[Tensor, Tensor]:
        """Return ids [s, k] and log-probabilities [s, k] of the sample ``index``.

        Raises DataError if the store has the sample with other tokens, or is damaged.
        """
        file, row = self._places[index]
        return file.entries(row, checksum, f"sample {index}")


def no_entries(settings: StoreSettings) -> tuple[Tensor, Tensor]:
    """Return ids [s, k] and log-probabilities [s, k] of a sample without entries."""
    shape = settings.seq_length, settings.top_k
    return torch.zeros(shape, dtype=torch.int32), torch.full(shape, float("-inf"))


class StoreFile:
    """One file of a store."""

    def __init__(self, path: Path, settings: StoreSettings) -> None:
        self.path = path
        self.settings = settings
        try:
            self._entries: dict[str, TensorEntry] = read_header(path)
        except CheckpointError as error:
            raise DataError(str(error)) from None
        if self._entries.keys() != _TENSORS:
            raise DataError(f"{path} is damaged: it has the tensors {sorted(self._entries)}")

    def read(self, name: str, begin: int = 0, end: int | None = None) -> Tensor:
        """Return the elements ``begin`` to ``end`` of the flattened tensor ``name``."""
        entry = self._entries[name]
        size = entry.dtype.itemsize
        number = entry.num_bytes // size if end is None else end
        offset = entry.start + begin * size
        try:
            data = np.fromfile(self.path, np.uint8, (number - begin) * size, offset=offset)
        except OSError as error:
            raise DataError(f"{self.path} cannot be read: {error.strerror}") from None
        return torch.from_numpy(data).view(entry.dtype)

    @cached_property
    def _begins(self) -> Tensor:
        """Where the entries of each sample begin, and the end of the last one."""
        counts = self.read("counts").view(-1, self.settings.seq_length).sum(1)
        return torch.cat([counts.new_zeros(1), counts.cumsum(0)])

    def entries(self, row: int, checksum: int, name: str) -> tuple[Tensor, Tensor]:
        """Return `LogitsStore.entries` of row ``row``, which is called ``name`` in messages."""
        if int(self.read("checksum", row, row + 1)) != checksum:
            raise DataError(
                f"{self.path}: {name} has other tokens here: save the store with the data, the "
                "seed and the number of samples of this run"
            )
        begin, end = self._begins[row : row + 2].tolist()
        ids = self.read("ids", begin, end)
        log_probs = self.read("log_probs", begin, end)
        damage = int(self.read("damage", row, row + 1))
        if zlib.crc32(bytes_of(log_probs), zlib.crc32(bytes_of(ids))) != damage:
            raise DataError(f"{self.path} is damaged at {name}: save the store again")
        length = self.settings.seq_length
        counts = self.read("counts", row * length, (row + 1) * length)
        is_given = torch.arange(self.settings.top_k) < counts.unsqueeze(1)
        found_ids, found = no_entries(self.settings)
        found_ids[is_given] = ids
        found[is_given] = log_probs.float()
        return found_ids, found
