"""Partition the records of the input, and record which partitions are finished.

Records are assigned to partitions round-robin or, with ``keep_sequential``, in contiguous ranges.
The records of each partition are written to a temporary file beside the output.  If a file is a
record, a partition is a list of input files and nothing is written.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO

from megatron.training.preprocess.documents import RecordFormat
from megatron.training.preprocess.inputs import BLOCK_BYTES, SEPARATORS, blocks


@dataclass(frozen=True)
class Partitioning:
    """Division of ``paths`` into ``count`` partitions."""

    paths: Sequence[str]
    count: int
    keep_sequential: bool
    record_format: RecordFormat
    output_prefix: str

    def by_files(self) -> list[list[str]] | None:
        """Return the input files of each partition; None if records must be distributed."""
        if self._cut_by() != "document":
            return None
        if self.keep_sequential:
            share = -(-len(self.paths) // self.count)
            return [list(self.paths[i * share : (i + 1) * share]) for i in range(self.count)]
        return [list(self.paths[i :: self.count]) for i in range(self.count)]

    def dealt_path(self, partition: int) -> str:
        """Return the temporary file with the records of a partition."""
        # The extension keeps its meaning: JSON or plain text.
        extension = ".txt" if self.record_format.is_plain(self.paths[0]) else ".jsonl"
        return f"{self.output_prefix}_{partition}.dealt{extension}"

    def deal(self) -> None:
        """Write the records of every partition to its temporary file."""
        share = self._share() if self.keep_sequential else 0
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
        for block in blocks(self.paths, separator, BLOCK_BYTES):
            yield _split(block.read(), separator)

    def _share(self) -> int:
        """Return the number of records per contiguous partition; the last may have fewer."""
        return -(-sum(len(records) for records in self._records()) // self.count)

    def _cut_by(self) -> str:
        return self.record_format.cut_by(self.paths[0])

    def original_line(self, partition: int, line: int) -> tuple[str, int] | None:
        """Return the input file and line of a line in a partition's temporary file.

        Both lines count from 1.  None if records are not lines.
        """
        if self._cut_by() != "line":
            return None
        if self.keep_sequential:
            number = partition * self._share() + line - 1
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
    """Progress of an interrupted run: a file beside the output, valid for equal options."""

    def __init__(self, path: str, key: Mapping[str, object]) -> None:
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
            return  # damaged, or of another run: start again

    def write(self) -> None:
        """Write the current progress to disk atomically."""
        content = {"key": self._key, "dealt": self.dealt, "finished": sorted(self.finished)}
        with open(self._path + ".tmp", "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.replace(self._path + ".tmp", self._path)

    def remove(self) -> None:
        """Remove the file: the run is complete."""
        with contextlib.suppress(FileNotFoundError):
            os.remove(self._path)


def _split(data: bytes, separator: re.Pattern[bytes] | None) -> list[bytes]:
    if separator is None:
        return [data]
    if separator is SEPARATORS["line"]:
        return data.removesuffix(b"\n").split(b"\n")
    return [record for record in separator.split(data) if record.strip()]
