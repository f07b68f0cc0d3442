"""Parse blocks of records into the texts of documents."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron.core.config.errors import ConfigError, DataError
from megatron.training.preprocess.inputs import (
    BLOCK_BYTES,
    PARQUET,
    SEPARATORS,
    Block,
    blocks,
    find_inputs,
    pieces,
)

Text = str | list[str]  # a list: text already split into sentences

_PARAGRAPH_END = re.compile(SEPARATORS["paragraph"].pattern.decode())
_PIECE_BYTES = 1 << 22


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

    def is_plain(self, path: str) -> bool:
        """Return whether the file is plain text, whose only key is the first."""
        if self.plain_text is not None:
            return self.plain_text
        return path.removesuffix(".gz").removesuffix(".zst").endswith((".txt", ".text"))

    def cut_by(self, path: str) -> str:
        """Return the key of ``SEPARATORS`` that splits this file into records."""
        return self.sample_by if self.is_plain(path) else "line"

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
                    reason = f"the record has no key {error}; name the keys with --json-keys"
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
        cut_by = self.cut_by(block.path)
        if cut_by == "document":
            yield 0, text
        elif cut_by == "paragraph":
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
    separator = SEPARATORS.get(record_format.cut_by(paths[0]))
    for block in blocks(paths, separator, BLOCK_BYTES):
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
    wrong = next((path for path in paths if path.endswith(PARQUET)), None)
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
