"""Preprocess input files to ``{prefix}_{key}_{document|sentence}.bin/.idx``.

Records are assigned to partitions round-robin or, with ``keep_sequential_samples``, in contiguous
ranges.  The records of each partition are written to a temporary file beside the output; a manifest
records which partitions are finished.  If a file is a record, a partition is a list of input files
and nothing is written.
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
from dataclasses import asdict, dataclass, fields
from itertools import islice

import numpy as np

from megatron.core.config.errors import ConfigError, DataError
from megatron.core.datasets.index_cache import write_atomically
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.core.datasets.indexed_format import DType, get_bin_path, get_crc_path, get_idx_path
from megatron.training.preprocess.documents import (
    BLOCK_BYTES,
    LINE,
    BadRecord,
    RecordFormat,
    block_bytes,
    blocks,
    check_one_kind,
    find_inputs,
    flatten,
    locate,
)
from megatron.training.preprocess.encode import (
    BlockEncoder,
    Progress,
    WorkerPool,
    sentence_splitter,
)
from megatron.training.tokenizer.base import MegatronTokenizer
from megatron.training.tokenizer.fast import TextEncoder, candidates, difference
from megatron.training.tokenizer.fingerprint import Fingerprint, check_eod

logger = logging.getLogger(__name__)

_SAMPLED = 100  # texts
_SAMPLE_BYTES = 1 << 15  # read for them, and the longest beginning of a text
_OTHER_FILES = 64  # open files besides the files of partitions
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
        # While records are dealt, a file is open for each partition.
        most = max(resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _OTHER_FILES, 1)
        if self.partitions > most:
            raise ConfigError(
                f"--partitions {self.partitions} must be at most {most}: this process may not open "
                "more files (ulimit -n)"
            )
        for key in self.record_format.json_keys:
            if self.key_in_name and "/" in key:
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
        level = "sentence" if self.split_sentences else "document"
        return f"{self.output_prefix}{part}" + (f"_{key}_{level}" if self.key_in_name else "")


def preprocess(options: PreprocessOptions, tokenizer: MegatronTokenizer) -> list[str]:
    """Write the token files and return their prefixes.

    With partitions, a rerun continues where an earlier run was interrupted.
    """
    paths = find_inputs(options.input)
    check_one_kind(paths, options.record_format)
    backend = options.tokenizer_backend
    encoder = choose_encoder(tokenizer, backend, paths, options.record_format)
    splitter = None
    if options.split_sentences:
        splitter = sentence_splitter(options.lang, options.keep_newlines)
    block_encoder = BlockEncoder(
        encoder=encoder,
        record_format=options.record_format,
        dtype=DType.optimal_dtype(tokenizer.vocab_size),
        vocab_size=tokenizer.vocab_size,
        eod=check_eod(tokenizer, "--append-eod") if options.append_eod else None,
        splitter=splitter,
    )
    _say(f"{encoder.name} encodes")
    keys = options.record_format.json_keys
    keys = keys[:1] if options.record_format.is_plain(paths[0]) else keys
    with WorkerPool(block_encoder, options.workers) as pool:
        fingerprint = Fingerprint.of(tokenizer)
        run = _Run(options, paths, keys, pool, block_encoder.dtype, fingerprint.sha256)
        try:
            prefixes = run.partitioned() if options.partitions > 1 else run.write(paths)
        except BadRecord as error:
            line = locate(error)
            raise DataError(f"{error.block.path}, line {line}: {error.reason}") from error
        for prefix in prefixes:
            fingerprint.write(prefix)
    return prefixes


def choose_encoder(
    tokenizer: MegatronTokenizer, backend: str, paths: Sequence[str], record_format: RecordFormat
) -> TextEncoder:
    """Return the first encoder that gives the ids of the tokenizer's own library for some texts."""
    sample = _sample(paths, record_format)
    for encoder in candidates(tokenizer, backend):
        found = difference(tokenizer, encoder, sample)
        if found is None:
            return encoder
        if backend != "auto":
            flag = f"--tokenizer-backend {backend}"
            raise ConfigError(f"{flag}: {found}; use auto or owner")
        logger.warning("%s; it is switched off", found)
    raise AssertionError("the owner comes last and is never refused")


def _sample(paths: Sequence[str], record_format: RecordFormat) -> list[str]:
    """Return the beginnings of the first documents."""
    separator = record_format.separator(paths[0])
    with contextlib.suppress(BadRecord, StopIteration):  # the worker that encodes it reports it
        texts = record_format.texts(next(blocks(paths, separator, _SAMPLE_BYTES)))
        found = [text[:_SAMPLE_BYTES] for key in texts for text in flatten(texts[key])[0]]
        return [text for text in found[:_SAMPLED] if not _SURROGATE.search(text)]
    return []


@dataclass(frozen=True)
class _Run:
    """One call of ``preprocess``."""

    options: PreprocessOptions
    paths: Sequence[str]
    keys: Sequence[str]
    pool: WorkerPool
    dtype: type[np.integer]
    tokenizer_hash: str

    def partitioned(self) -> list[str]:
        """Encode one partition after the other, then concatenate their files."""
        options = self.options
        count = options.partitions
        manifest = Manifest(options.output_prefix + ".partitions.json", self._manifest_key())
        if manifest.finished:
            _say(f"partitions {sorted(manifest.finished)} are finished already")
        is_dealt = self._separator is not None
        if not is_dealt:
            share = -(-len(self.paths) // count)
            parts = [slice(i * share, (i + 1) * share) for i in range(count)]
            if not options.keep_sequential_samples:
                parts = [slice(i, None, count) for i in range(count)]
            files = [self.paths[part] for part in parts]
        else:
            # The extension keeps its meaning: JSON or plain text.
            plain = options.record_format.is_plain(self.paths[0])
            extension = ".txt" if plain else ".jsonl"
            files = [[f"{options.output_prefix}_{i}.dealt{extension}"] for i in range(count)]
            if not manifest.dealt:
                _say(f"dealing records to {count} partitions")
                self._deal([path for (path,) in files])
                manifest.dealt = True
                manifest.write()
        for partition in range(count):
            if partition not in manifest.finished:
                _say(f"partition {partition} of {count}")
                self._write_partition(partition, files[partition])
                manifest.finished.add(partition)
                manifest.write()
            if is_dealt:
                with contextlib.suppress(FileNotFoundError):
                    os.remove(files[partition][0])
        prefixes = self._merge()
        os.remove(manifest.path)
        for key in self.keys:
            for partition in range(count):
                prefix = options.output(key, partition)
                for path in (get_bin_path(prefix), get_idx_path(prefix), get_crc_path(prefix)):
                    os.remove(path)
        return prefixes

    @property
    def _separator(self) -> re.Pattern[bytes] | None:
        return self.options.record_format.separator(self.paths[0])

    def _deal(self, outputs: Sequence[str]) -> None:
        """Write the records of every partition to its file."""
        end = b"\n" if self._separator is LINE else b"\n\n"
        share = self._records_per_partition()
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(open(path + ".tmp", "wb")) for path in outputs]
            for number, record in enumerate(self._records(self.paths)):
                file = files[number // share if share else number % len(files)]
                file.write(record + end)
        for path in outputs:
            os.replace(path + ".tmp", path)

    def _records(self, paths: Sequence[str]) -> Iterator[bytes]:
        separator = self._separator
        assert separator is not None, "files that are records are not dealt"
        for block in blocks(paths, separator, BLOCK_BYTES):
            data = block.read()
            if separator is LINE:
                yield from data.removesuffix(b"\n").split(b"\n")
            else:
                yield from (record for record in separator.split(data) if record.strip())

    def _records_per_partition(self) -> int:
        """Return the number of records of a contiguous partition; 0: they are dealt in turn."""
        if not self.options.keep_sequential_samples:
            return 0
        return -(-sum(1 for _ in self._records(self.paths)) // self.options.partitions)

    def _write_partition(self, partition: int, paths: Sequence[str]) -> None:
        try:
            self.write(paths, partition)
        except BadRecord as error:
            if self._separator is not LINE:
                raise
            dealt = locate(error) - 1  # records of this partition before the wrong one
            share = self._records_per_partition()
            count = self.options.partitions
            number = partition * share + dealt if share else dealt * count + partition
            lines = ((path, i) for path in self.paths for i, _ in enumerate(self._records([path])))
            path, line = next(islice(lines, number, None))
            raise DataError(f"{path}, line {line + 1}: {error.reason}") from error

    def write(self, paths: Sequence[str], partition: int | None = None) -> list[str]:
        """Encode the files into one file pair per key, of one partition if given."""
        outputs = {key: self.options.output(key, partition) for key in self.keys}
        builders = {
            key: IndexedDatasetBuilder(get_bin_path(prefix), self.dtype)
            for key, prefix in outputs.items()
        }
        progress = Progress(sum(map(os.path.getsize, paths)), self.options.log_interval)
        cut = blocks(paths, self._separator, block_bytes(paths, self.options.workers))
        for block in self.pool.map(cut):
            for key, texts in block.texts.items():
                builders[key].add_documents(*texts)
            progress.add(block.num_documents, block.num_bytes, block.stored_bytes)
        for key, builder in builders.items():
            builder.finalize(get_idx_path(outputs[key]))
        progress.print(is_last=True)
        return list(outputs.values())

    def _merge(self) -> list[str]:
        prefixes = [self.options.output(key) for key in self.keys]
        for key, prefix in zip(self.keys, prefixes, strict=True):
            builder = IndexedDatasetBuilder(get_bin_path(prefix), self.dtype)
            for partition in range(self.options.partitions):
                builder.add_index(self.options.output(key, partition))
            builder.finalize(get_idx_path(prefix))
        return prefixes

    def _manifest_key(self) -> dict[str, object]:
        """Return everything that determines the content of the partitions."""
        stats = [(os.path.abspath(path), os.stat(path)) for path in self.paths]
        without_effect = ("input", "output_prefix", "workers", "log_interval", "tokenizer_backend")
        options = asdict(self.options)
        return {
            "inputs": [[path, stat.st_size, stat.st_mtime_ns] for path, stat in stats],
            "tokenizer": self.tokenizer_hash,
            "dtype": np.dtype(self.dtype).name,
            **{name: value for name, value in options.items() if name not in without_effect},
        }


class Manifest:
    """Progress of an interrupted run: a file beside the output, valid for equal options."""

    def __init__(self, path: str, key: Mapping[str, object]) -> None:
        self.path = path
        self._key = json.loads(json.dumps(key))
        self.dealt = False
        self.finished: set[int] = set()
        try:
            with open(path, encoding="utf-8") as file:
                stored = json.load(file)
            if stored["key"] == self._key:
                # Both or neither: what is not a list raises before a field changes.
                finished = set(stored["finished"])
                self.dealt = bool(stored["dealt"])
                self.finished = finished
        except (FileNotFoundError, ValueError, TypeError, KeyError, RecursionError):
            return  # damaged, or of another run: start again

    def write(self) -> None:
        """Write the current progress to disk atomically."""
        content = {"key": self._key, "dealt": self.dealt, "finished": sorted(self.finished)}
        write_atomically(self.path, lambda file: file.write(json.dumps(content, indent=1).encode()))


def _say(message: str) -> None:
    print(f"> {message}", file=sys.stderr, flush=True)
