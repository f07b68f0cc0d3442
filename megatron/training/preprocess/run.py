"""Preprocess input files to ``{prefix}_{key}_{document|sentence}.bin/.idx``.

Records are assigned to partitions round-robin or, with ``keep_sequential``, in contiguous ranges.
The records of each partition are written to a temporary file beside the output; a manifest records
which partitions are finished.  If a file is a record, a partition is a list of input files and
nothing is written.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import re
import resource
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from typing import BinaryIO

import numpy as np

from megatron.core.config.errors import ConfigError, DataError
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.core.datasets.indexed_format import DType, get_bin_path, get_crc_path, get_idx_path
from megatron.training.preprocess.documents import (
    BadRecord,
    RecordFormat,
    check_one_kind,
    flatten,
    locate,
)
from megatron.training.preprocess.encode import BlockEncoder, EncodedTexts, sentence_splitter
from megatron.training.preprocess.inputs import (
    BLOCK_BYTES,
    SEPARATORS,
    Block,
    block_bytes,
    blocks,
    find_inputs,
    sample_blocks,
)
from megatron.training.preprocess.workers import Progress, WorkerPool, limit_workers
from megatron.training.tokenizer.base import MegatronTokenizer
from megatron.training.tokenizer.fast import TextEncoder, candidates, difference
from megatron.training.tokenizer.fingerprint import Fingerprint, check_eod


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


logger = logging.getLogger(__name__)

_OTHER_FILES = 64  # that are open beside those of partitions
_SAMPLE_POSITIONS = 8
_SAMPLE_BYTES = 1 << 12  # text read at each position
_SURROGATE = re.compile("[\ud800-\udfff]")  # invalid Unicode, which workers report


@dataclass(frozen=True, kw_only=True)
class PreprocessOptions:
    """Options of preprocessing: input, splitting, output."""

    input: str
    output_prefix: str
    record_format: RecordFormat
    append_eod: bool = False
    split_sentences: bool = False
    keep_newlines: bool = False
    lang: str = "english"
    workers: int = 1
    partitions: int = 1
    keep_sequential_samples: bool = False
    log_interval: int = 1000
    tokenizer_backend: str = "auto"
    key_in_name: bool = True

    @classmethod
    def of(
        cls, args: argparse.Namespace, record_format: RecordFormat, *, key_in_name: bool = True
    ) -> PreprocessOptions:
        """Build from the flags of a tool, which have the names of the fields."""
        names = {f.name for f in fields(cls)}
        given = {name: value for name, value in vars(args).items() if name in names}
        return cls(record_format=record_format, key_in_name=key_in_name, **given)

    def __post_init__(self) -> None:
        for flag, value in (("--workers", self.workers), ("--partitions", self.partitions)):
            if value < 1:
                raise ConfigError(f"{flag} {value} must be at least 1")
        # Dealing records keeps a file open for each partition.
        most = max(resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _OTHER_FILES, 1)
        if self.partitions > most:
            raise ConfigError(
                f"--partitions {self.partitions} must be at most {most}: this process may not open "
                "more files (ulimit -n)"
            )
        for key in self.record_format.json_keys:
            if self.key_in_name and ("/" in key or "\0" in key):
                raise ConfigError(
                    f"--json-keys {key!r}: the key is part of the names of the files, which have "
                    "no slash: rename it in the input"
                )
        directory = os.path.dirname(os.path.abspath(self.output_prefix))
        if not os.path.isdir(directory):
            raise ConfigError(
                f"--output-prefix {self.output_prefix}: there is no directory {directory}; make it"
            )

    def output(self, key: str, partition: int | None = None) -> str:
        """Return the file prefix of one key, of one partition if given."""
        part = "" if partition is None else f"_{partition}"
        if not self.key_in_name:
            return f"{self.output_prefix}{part}"
        level = "sentence" if self.split_sentences else "document"
        return f"{self.output_prefix}{part}_{key}_{level}"


def preprocess(options: PreprocessOptions, tokenizer: MegatronTokenizer) -> list[str]:
    """Write the token files and return their prefixes.

    With partitions, a rerun continues where an earlier run was interrupted.
    """
    options = replace(options, workers=limit_workers("--workers", options.workers))
    paths = find_inputs(options.input)
    check_one_kind(paths, options.record_format)
    sample = _sample(paths, options.record_format)
    for encoder in candidates(tokenizer, options.tokenizer_backend):
        try:
            return _preprocess_with(encoder, options, tokenizer, paths, sample)
        except _OtherIds as found:
            if options.tokenizer_backend != "auto":
                flag = f"--tokenizer-backend {options.tokenizer_backend}"
                raise ConfigError(f"{flag}: {found}; use auto or owner") from found
            logger.warning("%s; it is switched off", found)
    raise AssertionError("the owner comes last and is never refused")


def _preprocess_with(
    encoder: TextEncoder,
    options: PreprocessOptions,
    tokenizer: MegatronTokenizer,
    paths: Sequence[str],
    sample: Sequence[str],
) -> list[str]:
    blocks_to_tokens = _block_encoder(options, tokenizer, encoder)
    _say(f"{encoder.name} encodes")
    # Fork workers before the thread starts: they would inherit a lock that it holds.
    with (
        WorkerPool(blocks_to_tokens, options.workers) as pool,
        _Check(tokenizer, encoder, sample) as check,
    ):
        run = _Run(options, pool, check, blocks_to_tokens.dtype, paths)
        try:
            prefixes = run.partitioned() if options.partitions > 1 else run.whole()
        except BadRecord as error:
            line = locate(error)
            raise DataError(f"{error.path}, line {line}: {error.reason}") from error
        for prefix in prefixes:
            check.fingerprint().write(prefix)
    return prefixes


def _block_encoder(
    options: PreprocessOptions, tokenizer: MegatronTokenizer, encoder: TextEncoder
) -> BlockEncoder:
    splitter = (
        sentence_splitter(options.lang, options.keep_newlines) if options.split_sentences else None
    )
    return BlockEncoder(
        encoder=encoder,
        record_format=options.record_format,
        dtype=DType.optimal_dtype(tokenizer.vocab_size),
        vocab_size=tokenizer.vocab_size,
        eod=check_eod(tokenizer, "--append-eod") if options.append_eod else None,
        splitter=splitter,
    )


def _sample(paths: Sequence[str], record_format: RecordFormat) -> list[str]:
    """Return the beginnings of some documents, spread over the input."""
    separator = SEPARATORS.get(record_format.cut_by(paths[0]))
    found: list[str] = []
    for block in sample_blocks(paths, separator, _SAMPLE_POSITIONS, _SAMPLE_BYTES):
        with contextlib.suppress(BadRecord):  # the worker that encodes it reports its line
            for texts in record_format.texts(block).values():
                found += [text[:_SAMPLE_BYTES] for text in flatten(texts)[0]]
    return [text for text in found if not _SURROGATE.search(text)]


class _Run:
    """State of one call of ``preprocess``."""

    def __init__(
        self,
        options: PreprocessOptions,
        pool: WorkerPool,
        check: _Check,
        dtype: type[np.integer],
        paths: Sequence[str],
    ) -> None:
        self.options = options
        self.pool = pool
        self.check = check
        self.dtype = dtype
        self.paths = paths
        keys = options.record_format.json_keys
        plain = options.record_format.is_plain(paths[0])
        self.keys = keys[:1] if plain else keys

    def whole(self) -> list[str]:
        """Encode all input at once."""
        outputs = {key: self.options.output(key) for key in self.keys}
        self._write(self.paths, outputs)
        return list(outputs.values())

    def partitioned(self) -> list[str]:
        """Encode one partition after the other, then concatenate their files."""
        options = self.options
        partitioning = Partitioning(
            self.paths,
            options.partitions,
            options.keep_sequential_samples,
            options.record_format,
            options.output_prefix,
        )
        manifest = Manifest(options.output_prefix + ".partitions.json", self._manifest_key())
        if manifest.finished:
            _say(f"partitions {sorted(manifest.finished)} are finished already")
        files = partitioning.by_files()
        if files is None and not manifest.dealt:
            _say(f"dealing records to {options.partitions} partitions")
            partitioning.deal()
            manifest.dealt = True
            manifest.write()
        for partition in range(options.partitions):
            if partition not in manifest.finished:
                self._write_partition(partition, partitioning, files)
                manifest.finished.add(partition)
                manifest.write()
            if files is None:
                with contextlib.suppress(FileNotFoundError):
                    os.remove(partitioning.dealt_path(partition))
        prefixes = self._merge()
        manifest.remove()
        self._remove_parts()
        return prefixes

    def _write_partition(
        self, partition: int, partitioning: Partitioning, files: list[list[str]] | None
    ) -> None:
        _say(f"partition {partition} of {self.options.partitions}")
        outputs = {key: self.options.output(key, partition) for key in self.keys}
        if files is not None:
            self._write(files[partition], outputs)
            return
        dealt = partitioning.dealt_path(partition)
        try:
            self._write([dealt], outputs)
        except BadRecord as error:
            original = partitioning.original_line(partition, locate(error))
            if original is None:
                raise
            raise DataError(f"{original[0]}, line {original[1]}: {error.reason}") from error

    def _write(self, paths: Sequence[str], outputs: dict[str, str]) -> None:
        """Encode the files into one file pair per key."""
        options = self.options
        builders = {
            key: IndexedDatasetBuilder(get_bin_path(prefix), self.dtype)
            for key, prefix in outputs.items()
        }
        progress = Progress(sum(map(os.path.getsize, paths)), options.log_interval)
        for block in self.pool.map(self._blocks(paths)):
            for key, texts in block.texts.items():
                _append(builders[key], texts)
            progress.add(block.num_documents, block.num_bytes, block.stored_bytes)
            self.check.raise_if_found()
        self.check.wait()
        for key, builder in builders.items():
            builder.finalize(get_idx_path(outputs[key]))
        progress.finish()

    def _blocks(self, paths: Sequence[str]) -> Iterator[Block]:
        separator = SEPARATORS.get(self.options.record_format.cut_by(self.paths[0]))
        return blocks(paths, separator, block_bytes(paths, self.options.workers))

    def _merge(self) -> list[str]:
        prefixes = []
        for key in self.keys:
            prefix = self.options.output(key)
            builder = IndexedDatasetBuilder(get_bin_path(prefix), self.dtype)
            for partition in range(self.options.partitions):
                builder.add_index(self.options.output(key, partition))
            builder.finalize(get_idx_path(prefix))
            prefixes.append(prefix)
        return prefixes

    def _remove_parts(self) -> None:
        for key in self.keys:
            for partition in range(self.options.partitions):
                prefix = self.options.output(key, partition)
                os.remove(get_bin_path(prefix))
                os.remove(get_idx_path(prefix))
                with contextlib.suppress(FileNotFoundError):  # an earlier version wrote none
                    os.remove(get_crc_path(prefix))

    def _manifest_key(self) -> dict[str, object]:
        """Return everything that determines the content of the partitions."""
        stats = [(os.path.abspath(path), os.stat(path)) for path in self.paths]
        options = self.options
        return {
            "inputs": [[path, stat.st_size, stat.st_mtime_ns] for path, stat in stats],
            "tokenizer": self.check.fingerprint().sha256,
            "dtype": np.dtype(self.dtype).name,
            "json_keys": list(self.keys),
            "sample_by": options.record_format.sample_by,
            "plain_text": options.record_format.plain_text,
            "append_eod": options.append_eod,
            "split_sentences": options.split_sentences,
            "keep_newlines": options.keep_newlines,
            "lang": options.lang,
            "partitions": options.partitions,
            "keep_sequential_samples": options.keep_sequential_samples,
        }


class _OtherIds(Exception):
    """The encoder in use gives different ids than the tokenizer's own library."""


class _Check:
    """Thread that compares the encoder with its owner and takes the fingerprint meanwhile."""

    def __init__(
        self, tokenizer: MegatronTokenizer, encoder: TextEncoder, sample: Sequence[str]
    ) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._difference = self._thread.submit(difference, tokenizer, encoder, sample)
        self._fingerprint = self._thread.submit(Fingerprint.of, tokenizer)

    def __enter__(self) -> _Check:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(cancel_futures=True)  # no thread may run at the next fork

    def raise_if_found(self) -> None:
        """Raise _OtherIds if a difference has been found so far."""
        if self._difference.done():
            self.wait()

    def wait(self) -> None:
        """Wait for the comparison; raise _OtherIds if there is a difference."""
        if (found := self._difference.result()) is not None:
            raise _OtherIds(found)

    def fingerprint(self) -> Fingerprint:
        """Wait for the fingerprint of the tokenizer and return it."""
        return self._fingerprint.result()


def _append(builder: IndexedDatasetBuilder, texts: EncodedTexts) -> None:
    if len(texts.num_sequences) == 0:
        return
    if texts.num_sequences.max() <= 1:
        lengths = np.zeros(len(texts.num_sequences), np.int64)
        lengths[texts.num_sequences > 0] = texts.lengths
        builder.add_documents(texts.tokens, lengths)
        return
    sequence_ends = np.cumsum(texts.num_sequences)
    token_ends = np.concatenate(([0], np.cumsum(texts.lengths, dtype=np.int64)))
    for end, count in zip(sequence_ends.tolist(), texts.num_sequences.tolist(), strict=True):
        tokens = texts.tokens[token_ends[end - count] : token_ends[end]]
        builder.add_document(tokens, texts.lengths[end - count : end].tolist())


def _say(message: str) -> None:
    print(f"> {message}", file=sys.stderr, flush=True)
