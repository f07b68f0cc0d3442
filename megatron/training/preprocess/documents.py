"""Split input files into blocks of complete records, and parse these into texts of documents.

A record is a line, a paragraph or a file.  A block is a few megabytes of records.  For a plain file
it is a range of bytes, which a worker reads itself; for a compressed file it holds the bytes.
Parquet files are read as JSON lines, in batches from one row group after the other, so memory does
not grow with the file; other binary files are refused.
"""

from __future__ import annotations

import codecs
import glob
import gzip
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, BinaryIO

from megatron.core.config.errors import ConfigError, DataError
from megatron.core.optional import require

_HEAD_BYTES = 512
_PARQUET = ".parquet"
_OF_COLUMNS = (_PARQUET, ".arrow")


_ROWS_AT_ONCE = 64  # one dictionary entry may stand for all of them


def json_lines(path: str) -> Iterator[tuple[bytes, int]]:
    """Yield ``{"text": ..., ...}`` lines of a batch of rows, and the bytes read so far.

    ``path``: a Parquet or Arrow file.
    """
    kind = "a Parquet" if path.endswith(_PARQUET) else "an Arrow"
    wanted_by = f"--input {path} is {kind} file"
    arrow = require("pyarrow", wanted_by)
    num_rows = 0
    stored_bytes = os.path.getsize(path)

    def text_columns(schema: Any) -> list[str]:
        columns = [field.name for field in schema if _is_text(field.type, arrow.types)]
        if not columns:
            raise DataError(
                f"--input {path} has no column of text or lists of text: its columns are "
                + ", ".join(f"{field.name} ({field.type})" for field in schema)
            )
        return columns

    read = _parquet_batches if path.endswith(_PARQUET) else _arrow_batches
    try:
        for batch, share in read(path, wanted_by, text_columns):
            rows = batch.to_pylist()
            num_rows += len(rows)
            lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            yield lines.encode(), int(stored_bytes * share)
    except MemoryError:
        raise DataError(
            f"{path}: {_ROWS_AT_ONCE} rows after row {num_rows} do not fit into memory: cut its "
            "texts"
        ) from None
    except DataError:  # a ValueError too
        raise
    except (arrow.ArrowException, OSError, ValueError) as error:
        raise DataError(
            f"{path} is damaged after row {num_rows}: {error}; copy it again"
        ) from error


_Columns = Callable[[Any], list[str]]  # schema -> names


def _parquet_batches(path: str, wanted_by: str, choose: _Columns) -> Iterator[tuple[Any, float]]:
    """Yield batches of the chosen columns, and which share of the file is read."""
    # Without threads: workers are forked while the file is open.
    with require("pyarrow.parquet", wanted_by).ParquetFile(path, pre_buffer=False) as file:
        num_rows = 0
        columns = choose(file.schema_arrow)
        for batch in file.iter_batches(_ROWS_AT_ONCE, columns=columns, use_threads=False):
            num_rows += batch.num_rows
            yield batch, num_rows / file.metadata.num_rows


def _arrow_batches(path: str, wanted_by: str, choose: _Columns) -> Iterator[tuple[Any, float]]:
    """Yield batches of an Arrow stream, as the datasets library saves it; see above."""
    source = require("pyarrow", wanted_by).OSFile(path)
    with require("pyarrow.ipc", wanted_by).open_stream(source) as stream:
        columns = choose(stream.schema)
        for each in stream:
            batch = each.select(columns)
            batch.validate(full=True)  # offsets beyond the file would end the process
            share = source.tell() / max(1, source.size())
            for start in range(0, batch.num_rows, _ROWS_AT_ONCE):
                yield batch.slice(start, _ROWS_AT_ONCE), share


def _is_text(kind: Any, types: ModuleType) -> bool:
    if types.is_dictionary(kind) or types.is_list(kind) or types.is_large_list(kind):
        return _is_text(kind.value_type, types)
    return bool(types.is_string(kind) or types.is_large_string(kind))


_COMPRESSED = (".gz", ".zst")
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
        elif path.endswith(_OF_COLUMNS):
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


BLOCK_BYTES = 4 << 20
_SMALLEST_BLOCK = 1 << 16
_LARGEST_BLOCK = 1 << 30
_WINDOW = 1 << 16  # bytes read in one call to find the end of a block
LINE = re.compile(rb"\n")
_PARAGRAPH = re.compile(rb"\n[ \t\r]*\n\s*")
_PARAGRAPH_END = re.compile(_PARAGRAPH.pattern.decode())
# --sample-by -> separator of records; without one a file is one record
SEPARATORS = {"line": LINE, "paragraph": _PARAGRAPH, "document": None}
_PIECE_BYTES = 1 << 22
Text = str | list[str]  # a list: text already split into sentences


@dataclass(frozen=True)
class Block:
    """Complete records: decompressed bytes [start, end) of ``path``, in ``data`` if not None."""

    path: str
    start: int
    end: int
    stored_bytes: int  # its share of the file on disk
    data: bytes | None = None

    def read(self) -> bytes:
        """Return the bytes of the block, without a byte order mark at the start of its file."""
        data = self.data
        if data is None:
            with open(self.path, "rb") as file:
                file.seek(self.start)
                data = file.read(self.end - self.start)
        return data.removeprefix(codecs.BOM_UTF8) if self.start == 0 else data


def find_inputs(pattern: str, flag: str = "--input") -> list[str]:
    """Return the sorted matches of ``pattern``, which ``flag`` gives.

    Raises ConfigError if there are none, DataError if one is binary.
    """
    paths = [pattern] if os.path.isfile(pattern) else sorted(glob.glob(pattern))
    paths = [path for path in paths if os.path.isfile(path)]
    if not paths:
        raise ConfigError(f"{flag} {pattern}: no such file; give a file or a quoted pattern")
    for path in paths:
        head, _ = next(pieces(path, _HEAD_BYTES), (b"", 0))
        if b"\0" in head:
            inside = f" inside {os.path.splitext(path)[1]}" if path.endswith(_COMPRESSED) else ""
            raise DataError(
                f"{flag} {path} is binary{inside} (it begins with {head[:8]!r}), not JSON lines "
                "or text: extract or convert it; name gzip .gz, zstd .zst and Parquet .parquet"
            )
    return paths


def block_bytes(paths: Sequence[str], num_workers: int) -> int:
    """Return the block size: `BLOCK_BYTES`, or less so that every worker has several blocks."""
    share = sum(map(os.path.getsize, paths)) // (4 * num_workers)
    return max(_SMALLEST_BLOCK, min(BLOCK_BYTES, share))


def blocks(
    paths: Sequence[str], separator: re.Pattern[bytes] | None, num_bytes: int
) -> Iterator[Block]:
    """Yield the records of all files in order, in blocks of about ``num_bytes``."""
    for path in paths:
        if path.endswith((*_COMPRESSED, *_OF_COLUMNS)):  # read from the beginning
            yield from _blocks_of_stream(path, separator, num_bytes)
            continue
        start = 0
        end = os.path.getsize(path)
        with open(path, "rb", buffering=0) as file:
            while start < end:
                cut = _cut(file, separator, start + num_bytes, end)
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


def _cut(file: BinaryIO, separator: re.Pattern[bytes] | None, at: int, end: int) -> int:
    """Return the end of the first separator at or after ``at``, or ``end`` if none is before it."""
    while separator is not None and at < end:
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
    start = 0
    stored = 0
    wanted = num_bytes
    for piece, position in pieces(path, num_bytes):
        ready += piece
        _check_size(path, start, len(ready))
        if separator is None or len(ready) < wanted:
            continue
        if separator is LINE:
            cut = ready.rfind(b"\n") + 1
        else:  # the last separator may extend beyond what is here
            ends = (found.end() for found in separator.finditer(ready))
            cut = max((end for end in ends if end < len(ready)), default=0)
        if cut:
            yield Block(path, start, start + cut, position - stored, bytes(ready[:cut]))
            del ready[:cut]
            start += cut
            stored = position
        wanted = max(num_bytes, 2 * len(ready))  # do not search a long record again for each piece
    if ready:
        yield Block(path, start, start + len(ready), os.path.getsize(path) - stored, bytes(ready))


class BadRecord(DataError):
    """A record that cannot be used, located by its block: its line in the file is not known yet."""

    def __init__(self, block: Block, newlines_before: int, reason: str) -> None:
        super().__init__(block, newlines_before, reason)
        self.block = block
        self.newlines_before = newlines_before  # in the block, before the record
        self.reason = reason


@dataclass(frozen=True)
class RecordFormat:
    """How a block is split into records, and these into texts.

    ``sample_by`` splits plain text; JSON has one record per line.
    """

    json_keys: tuple[str, ...] = ("text",)
    sample_by: str = "line"
    plain_text: bool | None = None  # None: the file's name decides
    empty_is_error: bool = False  # else blank lines are skipped
    keys_flag: str = "--json-keys"  # for messages

    def is_plain(self, path: str) -> bool:
        """Return whether the file is plain text, whose only key is the first."""
        if self.plain_text is not None:
            return self.plain_text
        return path.removesuffix(".gz").removesuffix(".zst").endswith((".txt", ".text"))

    def separator(self, path: str) -> re.Pattern[bytes] | None:
        """Return the separator of this file's records; None: the file is one."""
        return SEPARATORS[self.sample_by] if self.is_plain(path) else LINE

    def texts(self, block: Block) -> dict[str, list[Text]]:
        """Return the texts of the block's documents per key.  Raises BadRecord."""
        lines = self._lines(block)
        if self.is_plain(block.path):
            return {self.json_keys[0]: [text for _, text in lines]}
        found: dict[str, list[Text]] = {key: [] for key in self.json_keys}
        columns = [(key, found[key].append) for key in self.json_keys]
        for number, line in lines:
            try:
                record = json.loads(line)
                if not isinstance(record, dict):
                    raise TypeError(f"the record is {type(record).__name__}, not an object")
                for key, append in columns:
                    append(_checked(record[key]))
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                reason = str(error)
                if isinstance(error, KeyError):
                    reason = f"the record has no key {error}; name it with {self.keys_flag}"
                elif isinstance(error, json.JSONDecodeError):
                    reason = f"no JSON: {error.msg} at character {error.pos + 1}"
                raise BadRecord(block, number, reason) from error
        return found

    def newlines_before(self, block: Block, document: int) -> int:
        """Count the newlines of the block before its document number ``document``."""
        for index, (number, _) in enumerate(self._lines(block)):
            if index == document:
                return number
        return 0

    def _lines(self, block: Block) -> Iterator[tuple[int, str]]:
        """Yield the records that are not blank, each with the count of newlines before it."""
        data = block.read()
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            newlines = data.count(b"\n", 0, error.start)
            raise BadRecord(block, newlines, f"no UTF-8: {error}") from error
        del data
        separator = self.separator(block.path)
        if separator is None:
            yield 0, text
        elif separator is _PARAGRAPH:
            yield from _paragraphs(text)
        else:
            for number, line in enumerate(text.removesuffix("\n").split("\n") if text else ()):
                if line and not line.isspace():
                    yield number, line.removesuffix("\r")
                elif self.empty_is_error:
                    raise BadRecord(block, number, "the line is empty")


def read_documents(
    pattern: str, record_format: RecordFormat
) -> Iterator[tuple[Block, dict[str, list[Text]]]]:
    """Yield every block of the files that ``pattern`` matches, and its texts per key."""
    paths = find_inputs(pattern)
    check_one_kind(paths, record_format)
    for block in blocks(paths, record_format.separator(paths[0]), BLOCK_BYTES):
        try:
            yield block, record_format.texts(block)
        except BadRecord as error:
            raise DataError(f"{block.path}, line {locate(error)}: {error.reason}") from error


def check_one_kind(paths: Sequence[str], record_format: RecordFormat) -> None:
    """Raise ConfigError if files have different formats, or if Parquet is read as text."""
    kinds = {record_format.is_plain(path): path for path in paths}
    if len(kinds) > 1:
        raise ConfigError(
            f"--input names plain text ({kinds[True]}) and JSON lines ({kinds[False]}); "
            "preprocess them apart, or say --input-format"
        )
    wrong = next((path for path in paths if path.endswith(_PARQUET)), None)
    if wrong and True in kinds:
        raise ConfigError(
            f"--input {wrong} is Parquet, not text: use --input-format jsonl and a file name that "
            "does not end in .txt"
        )


def locate(error: BadRecord) -> int:
    """Return the number of the bad record's line in its file, from 1; reads the file up to it."""
    line = 1 + error.newlines_before
    left = error.block.start
    for piece, _ in pieces(error.block.path, _PIECE_BYTES):
        line += piece.count(b"\n", 0, left)
        left -= len(piece)
        if left <= 0:
            break
    return line


def _paragraphs(text: str) -> Iterator[tuple[int, str]]:
    start = number = 0
    for found in (*_PARAGRAPH_END.finditer(text), None):
        end = found.start() if found else len(text)
        if start < end and not text[start:end].isspace():
            yield number, text[start:end].strip("\n")
        number += text.count("\n", start, found.end() if found else end)
        start = found.end() if found else end


def _checked(value: object) -> Text:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(part, str) for part in value):
        return value
    raise TypeError(f"the value is {type(value).__name__}, not text or a list of texts")


def flatten(texts: Sequence[Text]) -> tuple[list[str], list[int]]:
    """Return all texts in one list, and the number of texts of each document."""
    rows = [[text] if isinstance(text, str) else text for text in texts]
    return [text for row in rows for text in row], list(map(len, rows))
