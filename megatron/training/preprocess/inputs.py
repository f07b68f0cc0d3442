"""Split input files into blocks of complete records.

A record is a line, a paragraph or a file.  A block is a few megabytes of records.  For a plain file
it is a range of bytes, which a worker reads itself; for a compressed file it holds the bytes.
"""

from __future__ import annotations

import glob
import io
import itertools
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO

from megatron.core.config.errors import ConfigError, DataError
from megatron.training.preprocess.compressed import SUFFIXES, pieces, uncompressed_extension
from megatron.training.preprocess.file_kinds import HEAD_BYTES, is_parquet, refuse_binary

BLOCK_BYTES = 4 << 20
_SMALLEST_BLOCK = 1 << 16
_LARGEST_BLOCK = 1 << 30
_WINDOW = 1 << 16  # bytes read in one call to find the end of a block
_PLAIN_TEXT = (".txt", ".text")
SAMPLE_BY = ("line", "paragraph", "document")
# Separators of records; without one ("document") a file is one record.
SEPARATORS = {"line": re.compile(rb"\n"), "paragraph": re.compile(rb"\n[ \t\r]*\n\s*")}


@dataclass(frozen=True)
class Block:
    """Complete records: decompressed bytes [start, end) of ``path``, in ``data`` if not None."""

    path: str
    start: int
    end: int
    stored_bytes: int  # its share of the file on disk
    data: bytes | None = None

    def read(self) -> bytes:
        """Return the bytes of the block."""
        if self.data is not None:
            return self.data
        with open(self.path, "rb", buffering=0) as file:
            file.seek(self.start)
            return _read_exactly(file, self.end - self.start)


def find_inputs(pattern: str) -> list[str]:
    """Return the sorted matches of ``pattern``.

    Raises ConfigError if there are none, DataError if one is binary.
    """
    paths = [pattern] if os.path.isfile(pattern) else sorted(glob.glob(pattern))
    paths = [path for path in paths if os.path.isfile(path)]
    if not paths:
        raise ConfigError(f"--input {pattern}: no such file; give a file or a quoted pattern")
    for path in paths:
        inside = f" inside {os.path.splitext(path)[1]}" if path.endswith(SUFFIXES) else ""
        refuse_binary(path, _head(path), inside)
    return paths


def _head(path: str) -> bytes:
    head = b""
    for piece, _ in pieces(path, HEAD_BYTES):
        head += piece
        if len(head) >= HEAD_BYTES:
            break
    return head


def is_plain_text(path: str) -> bool:
    """Return whether the name of the file indicates text rather than JSON lines."""
    return uncompressed_extension(path) in _PLAIN_TEXT


def is_stream(path: str) -> bool:
    """Return whether the file must be read from its beginning: compressed, or Parquet."""
    return path.endswith(SUFFIXES) or is_parquet(path)


def block_bytes(paths: Sequence[str], num_workers: int) -> int:
    """Return the block size: `BLOCK_BYTES`, or less so that every worker has several blocks."""
    share = sum(map(os.path.getsize, paths)) // (4 * num_workers)
    return max(_SMALLEST_BLOCK, min(BLOCK_BYTES, share))


def blocks(
    paths: Sequence[str], separator: re.Pattern[bytes] | None, num_bytes: int
) -> Iterator[Block]:
    """Yield the records of all files in order, in blocks of about ``num_bytes``."""
    for path in paths:
        if is_stream(path):
            yield from _blocks_of_stream(path, separator, num_bytes)
        else:
            yield from _blocks_of_file(path, separator, num_bytes)


def sample_blocks(
    paths: Sequence[str], separator: re.Pattern[bytes] | None, positions: int, num_bytes: int
) -> Iterator[Block]:
    """Yield about ``num_bytes`` from each of ``positions`` places spread over the input.

    Of a compressed file, and of a file that is a single record, only the beginning is sampled.
    """
    for index in range(positions):
        at = index * len(paths) / positions
        path, share = paths[int(at)], at % 1
        size = os.path.getsize(path)
        if is_stream(path):
            if share == 0:
                yield from itertools.islice(blocks([path], separator, num_bytes), 1)
        elif separator is None:
            if share == 0 and size <= BLOCK_BYTES:
                yield Block(path, 0, size, size)
        else:
            with open(path, "rb", buffering=0) as file:
                start = _cut(file, separator, int(share * size), size) if share else 0
                end = _cut(file, separator, start + num_bytes, size)
            if end > start:
                yield Block(path, start, end, end - start)


def _blocks_of_file(
    path: str, separator: re.Pattern[bytes] | None, num_bytes: int
) -> Iterator[Block]:
    start, end = 0, os.path.getsize(path)
    with open(path, "rb", buffering=0) as file:
        while start < end:
            cut = end if separator is None else _cut(file, separator, start + num_bytes, end)
            _check_size(path, start, cut - start)
            yield Block(path, start, cut, cut - start)
            start = cut


def _check_size(path: str, start: int, num_bytes: int) -> None:
    """Raise DataError for a record that no worker can hold, or a file that decompresses to one."""
    if num_bytes > _LARGEST_BLOCK:
        raise DataError(
            f"{path}: the record at byte {start} has more than {_LARGEST_BLOCK} bytes: write one "
            "record per line, or cut the file"
        )


def _cut(file: BinaryIO, separator: re.Pattern[bytes], at: int, end: int) -> int:
    """Return the end of the first separator at or after ``at``, or ``end`` if none is before it."""
    window = b""
    while at < end:
        file.seek(at)
        window = file.read(min(_WINDOW, end - at))
        found = separator.search(window)
        # A separator at the edge of the window may extend beyond it: search again from its start.
        if found and (found.end() < len(window) or at + len(window) >= end):
            return at + found.end()
        at += max(found.start() if found and found.start() else len(window) - 1, 1)
    return end


def _blocks_of_stream(
    path: str, separator: re.Pattern[bytes] | None, num_bytes: int
) -> Iterator[Block]:
    ready = bytearray()  # decompressed, not in a block yet
    start, stored, wanted = 0, 0, num_bytes
    for piece, position in pieces(path, num_bytes):
        ready += piece
        _check_size(path, start, len(ready))
        if separator is None or len(ready) < wanted:
            continue
        if cut := _last_end(separator, ready):
            yield Block(path, start, start + cut, position - stored, bytes(ready[:cut]))
            del ready[:cut]
            start, stored = start + cut, position
        wanted = max(num_bytes, 2 * len(ready))  # do not search a long record again for each piece
    if ready:
        left = os.path.getsize(path) - stored
        yield Block(path, start, start + len(ready), left, bytes(ready))


def _last_end(separator: re.Pattern[bytes], data: bytearray) -> int:
    """Return the end of the last complete record of ``data`` with its separator, or 0."""
    if separator is SEPARATORS["line"]:
        return data.rfind(b"\n") + 1
    ends = [found.end() for found in separator.finditer(data) if found.end() < len(data)]
    return ends[-1] if ends else 0


def _read_exactly(file: io.RawIOBase, num_bytes: int) -> bytes:
    data = file.read(num_bytes) or b""
    while len(data) < num_bytes and (piece := file.read(num_bytes - len(data))):
        data += piece
    return data
