"""Split input files into blocks of complete records.

A record is a line, a paragraph or a file.  A block is a few megabytes of records.  For a plain file
it is a range of bytes, which a worker reads itself; for a compressed file it holds the bytes.
Parquet files are read as JSON lines, in batches from one row group after the other, so memory does
not grow with the file; other binary files are refused.
"""

from __future__ import annotations

import glob
import gzip
import io
import itertools
import json
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, BinaryIO

from megatron.core.config.errors import ConfigError, DataError
from megatron.core.optional import require

HEAD_BYTES = 512
_PARQUET = b"PAR1"
_SMALLEST_PARQUET = 12  # both magics, and the length of the footer
_TAR = b"ustar"
_TAR_AT = 257
# (first bytes, description, suggested fix).  Neither JSON nor text can begin with these bytes.
_SIGNATURES = (
    (b"\x1f\x8b", "gzip-compressed", "give it a name that ends in .gz"),
    (b"\x28\xb5\x2f\xfd", "zstd-compressed", "give it a name that ends in .zst"),
    (b"\xfd7zXZ\x00", "xz-compressed", "decompress it"),
    (b"\x04\x22\x4d\x18", "lz4-compressed", "decompress it"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", "extract it"),
    (b"PK\x03\x04", "a zip archive (or .npz, .pt)", "extract it"),
    (b"PK\x05\x06", "an empty zip archive", "extract it"),
    (b"ARROW1\x00\x00", "an Arrow (Feather) file", "convert it to Parquet or JSON lines"),
    (b"\xff\xff\xff\xff", "an Arrow stream", "convert it to Parquet or JSON lines"),
    (b"FEA1\x00", "a Feather file", "convert it to Parquet or JSON lines"),
    (b"PAR1\x15", "a Parquet file without its end", "copy it again"),
    (b"Obj\x01", "an Avro file", "convert it to Parquet or JSON lines"),
    (b"\x89HDF\r\n", "an HDF5 file", "convert it to Parquet or JSON lines"),
    (b"SQLite format 3\x00", "an SQLite database", "export it as JSON lines"),
    (b"\x93NUMPY", "a numpy array", "write its texts as JSON lines"),
    (b"MMIDIDX\x00", "the index of token files", "give the text that they were made from"),
    (b"\xff\xfe", "UTF-16 text", "save it as UTF-8"),
    (b"\xfe\xff", "UTF-16 text", "save it as UTF-8"),
    *((b"\x80" + bytes([i]), "a pickled object", "write it as JSON lines") for i in range(2, 6)),
    *(
        (b"BZh%d1AY&SY" % i, "bzip2-compressed", "decompress it, or compress it with gzip")
        for i in range(1, 10)
    ),
)


def is_parquet(path: str) -> bool:
    """Return whether the file begins and ends as Parquet does, whatever its name."""
    if os.path.getsize(path) < _SMALLEST_PARQUET:
        return False
    with open(path, "rb", buffering=0) as file:
        if file.read(len(_PARQUET)) != _PARQUET:
            return False
        file.seek(-len(_PARQUET), os.SEEK_END)
        return file.read() == _PARQUET


def refuse_binary(path: str, head: bytes, inside: str = "") -> None:
    """Raise DataError if ``head``, the first bytes of a file, is of a known binary format.

    ``inside``, for the message, names the compression that the bytes were in.
    """
    found = next((known for known in _SIGNATURES if head.startswith(known[0])), None)
    if found is None and head[_TAR_AT:].startswith(_TAR):
        found = (_TAR, "a tar archive", "extract it")
    if found is not None:
        raise DataError(f"--input {path} is {found[1]}{inside}, not JSON lines or text: {found[2]}")


_ROWS_AT_ONCE = 64  # one dictionary entry may stand for all of them


def json_lines(path: str) -> Iterator[tuple[bytes, int]]:
    """Yield ``{"text": ..., ...}`` lines of a batch of rows, and the bytes read so far."""
    wanted_by = f"--input {path} is a Parquet file"
    arrow = require("pyarrow", wanted_by)
    parquet = require("pyarrow.parquet", wanted_by)
    num_rows, stored_bytes = 0, os.path.getsize(path)
    try:
        # Without threads: workers are forked while the file is open.
        with parquet.ParquetFile(path, pre_buffer=False) as file:
            columns = _text_columns(path, file.schema_arrow, arrow.types)
            for batch in file.iter_batches(_ROWS_AT_ONCE, columns=columns, use_threads=False):
                rows = batch.to_pylist()
                num_rows += len(rows)
                lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
                yield lines.encode(), stored_bytes * num_rows // file.metadata.num_rows
    except MemoryError:
        raise DataError(
            f"{path}: {_ROWS_AT_ONCE} rows after row {num_rows} do not fit into memory: cut its "
            "texts"
        ) from None
    except (arrow.ArrowException, OSError, ValueError) as error:
        raise DataError(
            f"{path} is damaged after row {num_rows}: {error}; copy it again"
        ) from error


def _text_columns(path: str, schema: Any, types: ModuleType) -> list[str]:
    columns = [field.name for field in schema if _is_text(field.type, types)]
    if not columns:
        raise DataError(
            f"--input {path} has no column of text or lists of text: its columns are "
            + ", ".join(f"{field.name} ({field.type})" for field in schema)
        )
    return columns


def _is_text(kind: Any, types: ModuleType) -> bool:
    if types.is_dictionary(kind) or types.is_list(kind) or types.is_large_list(kind):
        return _is_text(kind.value_type, types)
    return bool(types.is_string(kind) or types.is_large_string(kind))


SUFFIXES = (".gz", ".zst")
_STORED_BYTES = 1 << 14  # of zstandard, read from disk in one call: 4 may stand for 128 KiB


def pieces(path: str, num_bytes: int) -> Iterator[tuple[bytes, int]]:
    """Yield the bytes of a file: decompressed as its name says, Parquet as JSON lines.

    A piece has about ``num_bytes`` bytes; with it comes the position reached in the file on disk.
    Raises DataError if the file is damaged.
    """
    errors: tuple[type[Exception], ...] = (OSError, EOFError, zlib.error)
    with open(path, "rb") as raw:
        if path.endswith(".gz"):
            source = iter(partial(gzip.GzipFile(fileobj=raw).read, num_bytes), b"")
        elif path.endswith(".zst"):
            zstandard = require("zstandard", f"--input {path}")
            errors = (*errors, zstandard.ZstdError)
            source = _zstandard_pieces(raw, zstandard)
        elif is_parquet(path):
            yield from json_lines(path)
            return
        else:
            source = iter(partial(raw.read, num_bytes), b"")
        try:
            for piece in source:
                yield piece, raw.tell()
        except errors as error:
            raise DataError(f"{path} is damaged: {error}; copy it again") from error


def _zstandard_pieces(raw: BinaryIO, zstandard: ModuleType) -> Iterator[bytes]:
    """Decompress frame by frame: zstandard's own reader accepts a truncated last frame."""
    decompressor = zstandard.ZstdDecompressor()
    frame = None  # None: between two frames
    while stored := raw.read(_STORED_BYTES):
        while stored:
            frame = frame or decompressor.decompressobj()
            yield frame.decompress(stored)
            stored = frame.unused_data if frame.eof else b""
            frame = None if frame.eof else frame
    if frame is not None:
        raise EOFError("it ends inside a compressed frame")


def uncompressed_extension(path: str) -> str:
    """Return the extension without compression: ``.jsonl`` for ``a.jsonl.gz``."""
    stem, extension = os.path.splitext(path)
    return os.path.splitext(stem)[1] if extension in SUFFIXES else extension


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
