"""Which records make up which partition, and which partitions are finished.

Records are dealt one by one to the partitions, or, with ``keep_sequential``, each partition is a
run of records.  Dealing writes the partitions' text beside the output; runs of a plain file are
named by their bytes and written nowhere.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from megatron.training.preprocess.documents import RecordFormat
from megatron.training.preprocess.inputs import (
    BLOCK_BYTES,
    SEPARATORS,
    Segment,
    blocks,
    is_stream,
)


@dataclass(frozen=True)
class Partitioning:
    """How ``paths`` are divided into ``count`` partitions."""

    paths: Sequence[str]
    count: int
    keep_sequential: bool
    record_format: RecordFormat
    output_prefix: str

    def by_segments(self) -> list[list[Segment]] | None:
        """Partitions that are files or runs of bytes of the input; None if it has to be dealt."""
        if self._cut_by() == "document":
            if self.keep_sequential:
                share = -(-len(self.paths) // self.count)
                parts = [self.paths[i * share : (i + 1) * share] for i in range(self.count)]
            else:
                parts = [self.paths[i :: self.count] for i in range(self.count)]
            return [[Segment(path) for path in part] for part in parts]
        runs_of_lines = self.keep_sequential and self._cut_by() == "line"
        return None if not runs_of_lines or any(map(is_stream, self.paths)) else self._runs()

    def _runs(self) -> list[list[Segment]]:
        """Runs of lines, found by counting them."""
        share = -(-sum(map(_count_lines, self.paths)) // self.count)
        found: list[list[Segment]] = [[] for _ in range(self.count)]
        number = 0  # of the record
        for path in self.paths:
            size, start = os.path.getsize(path), 0
            while start < size:
                partition = min(number // share, self.count - 1)
                wanted = (partition + 1) * share - number
                end, counted = _skip_lines(path, start, wanted)
                found[partition].append(Segment(path, start, end))
                start, number = end, number + counted
        return found

    def dealt_path(self, partition: int) -> str:
        """The file that holds the records of a partition, while it is needed."""
        # The extension keeps its meaning: JSON or plain text.
        extension = ".txt" if self.record_format.is_plain(self.paths[0]) else ".jsonl"
        return f"{self.output_prefix}_{partition}.dealt{extension}"

    def deal(self) -> None:
        """Write the records of every partition to a file of its own."""
        share = 0
        if self.keep_sequential:
            share = -(-sum(len(records) for records in self._records()) // self.count)
        separator = b"\n\n" if self._cut_by() == "paragraph" else b"\n"
        with contextlib.ExitStack() as stack:
            files: list[BinaryIO] = [
                stack.enter_context(open(self.dealt_path(i) + ".tmp", "wb"))
                for i in range(self.count)
            ]
            number = 0
            for records in self._records():
                for partition, mine in self._divide(records, number, share):
                    if mine:
                        files[partition].write(separator.join(mine) + separator)
                number += len(records)
        for i in range(self.count):
            os.replace(self.dealt_path(i) + ".tmp", self.dealt_path(i))

    def _divide(
        self, records: list[bytes], number: int, share: int
    ) -> Iterator[tuple[int, list[bytes]]]:
        if not self.keep_sequential:
            for i in range(self.count):
                yield i, records[(i - number) % self.count :: self.count]
            return
        start = 0
        while start < len(records):
            partition = (number + start) // share
            end = min(len(records), (partition + 1) * share - number)
            yield partition, records[start:end]
            start = end

    def _records(self) -> Iterator[list[bytes]]:
        separator = SEPARATORS.get(self._cut_by())
        for block in blocks([Segment(path) for path in self.paths], separator, BLOCK_BYTES):
            yield _split(block.read(), separator)

    def _cut_by(self) -> str:
        return self.record_format.cut_by(self.paths[0])

    def original_line(self, partition: int, line: int) -> tuple[str, int] | None:
        """File and line of a dealt line, numbers from 1; None where records are not lines."""
        if self._cut_by() != "line":
            return None
        if self.keep_sequential:
            share = -(-sum(len(records) for records in self._records()) // self.count)
            number = partition * share + line - 1
        else:
            number = (line - 1) * self.count + partition
        for path in self.paths:
            mine = Partitioning([path], 1, False, self.record_format, "")
            count = sum(len(records) for records in mine._records())
            if number < count:
                return path, number + 1
            number -= count
        return None


class Manifest:
    """What an interrupted run has finished: a file beside the output, for one set of options."""

    def __init__(self, path: str, key: dict[str, Any]) -> None:
        self._path = path
        self._key = json.loads(json.dumps(key))
        self.dealt = False
        self.finished: set[int] = set()
        try:
            with open(path, encoding="utf-8") as file:
                stored = json.load(file)
            if stored["key"] == self._key:
                self.dealt, self.finished = bool(stored["dealt"]), set(stored["finished"])
        except (FileNotFoundError, ValueError, TypeError, KeyError, RecursionError):
            return  # of another run, or damaged: start from the beginning

    def write(self) -> None:
        """Put the present state on disk, whole."""
        content = {"key": self._key, "dealt": self.dealt, "finished": sorted(self.finished)}
        with open(self._path + ".tmp", "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.replace(self._path + ".tmp", self._path)

    def remove(self) -> None:
        """Forget everything: the run is over."""
        with contextlib.suppress(FileNotFoundError):
            os.remove(self._path)


def _split(data: bytes, separator: re.Pattern[bytes] | None) -> list[bytes]:
    if separator is None:
        return [data]
    if separator is SEPARATORS["line"]:
        return data.removesuffix(b"\n").split(b"\n")
    return [record for record in separator.split(data) if record.strip()]


def _count_lines(path: str) -> int:
    count, last = 0, b"\n"
    with open(path, "rb", buffering=0) as file:
        while piece := file.read(BLOCK_BYTES):
            count += piece.count(b"\n")
            last = piece[-1:]
    return count + (last != b"\n")


def _skip_lines(path: str, start: int, wanted: int) -> tuple[int, int]:
    """The byte after ``wanted`` lines from ``start`` on, and how many there were."""
    counted = 0
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        at = start
        while piece := file.read(BLOCK_BYTES):
            here = piece.count(b"\n")
            if counted + here >= wanted:
                cut = -1
                for _ in range(wanted - counted):
                    cut = piece.index(b"\n", cut + 1)
                return at + cut + 1, wanted
            counted, at, last = counted + here, at + len(piece), piece[-1:]
    return at, counted + (last != b"\n")
