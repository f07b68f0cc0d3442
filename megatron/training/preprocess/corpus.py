"""Tokenize the text files of --data-path in the background, while training reads them.

Rank 0 starts one process (`start`), which writes the shards of `megatron.core.datasets.corpus` and
ends with rank 0 at the latest.  A later run, or another rank 0, continues behind the last finished
shard.  A directory of shards belongs to its input files, key and tokenizer.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from threading import Thread
from typing import Any

from megatron.core.config.errors import DataError, MegatronError
from megatron.core.datasets.corpus import CorpusProgress, alive_path, shard_prefix
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megatron.core.datasets.indexed_format import DType, get_bin_path, get_idx_path
from megatron.core.datasets.object_storage_utils import RangeReader, is_object_storage_path
from megatron.training.config.data import TEXT_ENDS, DataConfig
from megatron.training.preprocess.documents import (
    BLOCK_BYTES,
    BadRecord,
    Block,
    RecordFormat,
    blocks,
    check_one_kind,
    find_inputs,
    locate,
)
from megatron.training.preprocess.encode import BlockEncoder, EncodedBlock, WorkerPool
from megatron.training.preprocess.run import choose_encoder
from megatron.training.tokenizer.base import MegatronTokenizer, TokenizerSpec
from megatron.training.tokenizer.fingerprint import Fingerprint, check_eod
from megatron.training.tokenizer.tokenizer import create_tokenizer

_MOST_BLOCKS = 64  # of a shard; the first shards are smaller, so that training starts early
_POLL_S = 0.2
_SIGN_S = 10.0  # between two signs of life
_NAMED_LINES = 20  # bad lines that the record names; the others are counted


@dataclass(frozen=True, kw_only=True)
class CorpusSource:
    """A text corpus of --data-path and the directory of its shards."""

    path: str  # as the user named it
    directory: str
    inputs: tuple[str, ...]
    text_key: str

    def key(self) -> dict[str, Any]:
        """Return what must not change under the shards."""
        if is_object_storage_path(self.path):
            files = [[RangeReader(url).num_bytes] for url in self.inputs]
        else:
            files = [[stat.st_size, stat.st_mtime_ns] for stat in map(os.stat, self.inputs)]
        return {"inputs": list(self.inputs), "files": files}

    @contextmanager
    def local_inputs(self) -> Iterator[list[str]]:
        """Return paths of the input files, for the block; objects are copied for its time."""
        if not is_object_storage_path(self.path):
            yield [*self.inputs]
            return
        copies = [os.path.join(self.directory, os.path.basename(url)) for url in self.inputs]
        for url, copy in zip(self.inputs, copies, strict=True):
            RangeReader(url).download(copy + ".tmp")
            os.replace(copy + ".tmp", copy)
        yield copies
        for copy in copies:
            os.remove(copy)


def sources_of(
    paths: Sequence[str], data: DataConfig, tokenizer: MegatronTokenizer
) -> list[CorpusSource]:
    """Return the sources among ``paths`` that are text, not prefixes of .bin and .idx.

    Raises ConfigError or DataError for files that cannot be read, or that have changed since their
    first shard was written.
    """
    found = [path for path in dict.fromkeys(paths) if is_text(path)]
    tokens = Fingerprint.of(tokenizer).sha256 if found else ""
    sources = []
    for path in found:
        is_remote = is_object_storage_path(path)
        inputs = (path,) if is_remote else tuple(map(os.path.abspath, _files_of(path)))
        words = json.dumps([inputs, data.data_text_key, tokens])
        name = f"corpus-{hashlib.sha256(words.encode()).hexdigest()[:24]}"
        if is_remote and data.data_cache_path is None:
            raise DataError(
                f"--data-path {path} lies in object storage: name a directory for its tokens with "
                "--data-cache-path"
            )
        beside = os.path.dirname(inputs[0])
        directory = os.path.join(data.data_cache_path or os.path.join(beside, "cache"), name)
        source = CorpusSource(
            path=path, directory=directory, inputs=inputs, text_key=data.data_text_key
        )
        progress = CorpusProgress.read(directory)
        if progress is not None and progress.key != source.key():
            raise DataError(
                f"--data-path {path} has changed since its tokens were cached: restore it, or "
                f"remove {directory} to tokenize it again, which changes the stream of samples"
            )
        sources.append(source)
    return sources


def is_text(path: str) -> bool:
    """Return whether a data path names text files or a folder of the datasets library."""
    is_folder = os.path.isfile(os.path.join(path, "state.json"))
    return is_folder or (path.endswith(TEXT_ENDS) and not os.path.exists(get_idx_path(path)))


def _files_of(path: str) -> list[str]:
    """Return the input files of a path, in order; one kind of file.  Raises ConfigError."""
    state = os.path.join(path, "state.json")
    if os.path.isfile(state):
        listed = json.loads(Path(state).read_text(encoding="utf-8"))["_data_files"]
        return [os.path.join(path, each["filename"]) for each in listed]
    files = find_inputs(path, "--data-path")
    check_one_kind(files, RecordFormat())
    return files


def start(
    sources: Sequence[CorpusSource], tokenizer: TokenizerSpec, num_workers: int
) -> subprocess.Popen[bytes] | None:
    """Start the process that tokenizes what is not finished; None if all is.

    The process writes ``log.txt`` into the directory of the first source, and ends when the calling
    thread ends.
    """
    progress = [CorpusProgress.read(source.directory) for source in sources]
    left = [s for s, p in zip(sources, progress, strict=True) if p is None or not p.is_complete]
    if not left:
        return None
    for source in left:
        try:
            os.makedirs(source.directory, exist_ok=True)
            if not os.access(source.directory, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            raise DataError(
                f"cannot write {source.directory}: {error.strerror}; name a writable directory "
                "with --data-cache-path"
            ) from error
    job = {
        "sources": [asdict(source) for source in left],
        "tokenizer": asdict(tokenizer),
        "num_workers": num_workers,
        "parent": os.getpid(),
    }
    # This program, whatever lies in the folder where it was started.
    paths = [str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")]
    path = os.pathsep.join(filter(None, paths))
    env = os.environ | {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
    with open(os.path.join(left[0].directory, "log.txt"), "ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", __name__, json.dumps(job)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=env,
            start_new_session=True,
        )


@dataclass(frozen=True)
class _TolerantBlock(EncodedBlock):
    """An encoded block, and the lines that were left out."""

    bad_lines: list[tuple[int, str]] = field(default_factory=list)  # newlines before, reason


class _TolerantEncoder(BlockEncoder):
    """Leaves out records that cannot be used."""

    def encode(self, block: Block) -> EncodedBlock:
        """Encode the usable records of a block."""
        try:
            return _TolerantBlock(**vars(super().encode(block)))
        except BadRecord:
            pass
        bad: list[tuple[int, str]] = []
        good: list[bytes] = []
        for number, line in enumerate(block.read().split(b"\n")):
            try:
                super().encode(replace(block, data=line))
                good.append(line)
            except BadRecord as error:
                bad.append((number, error.reason))
        done = super().encode(replace(block, data=b"\n".join(good)))
        return _TolerantBlock(**vars(done), bad_lines=bad)


class _Writer:
    """Writes the shards of one source; `shards` yields after each."""

    def __init__(
        self,
        source: CorpusSource,
        tokenizer: MegatronTokenizer,
        num_workers: int,
        inputs: Sequence[str] = (),
    ) -> None:
        self.source = source
        self.inputs = inputs or source.inputs
        self.progress = CorpusProgress.read(source.directory) or CorpusProgress(key=source.key())
        self.record_format = RecordFormat((source.text_key,), keys_flag="--data-text-key")
        self.num_workers = num_workers
        self.dtype = DType.optimal_dtype(tokenizer.vocab_size)
        self.encoder = _TolerantEncoder(
            encoder=choose_encoder(tokenizer, "auto", self.inputs, self.record_format),
            record_format=self.record_format,
            dtype=self.dtype,
            vocab_size=tokenizer.vocab_size,
            eod=check_eod(tokenizer, "--data-path"),
            splitter=None,
        )

    def shards(self) -> Iterator[None]:
        """Write the shards that are not finished.  Raises DataError if no first record is good."""
        progress = self.progress
        source = self.source
        if progress.is_complete:
            return
        progress.error = None
        progress.write(source.directory)
        separator = self.record_format.separator(self.inputs[0])
        with WorkerPool(self.encoder, self.num_workers) as pool:
            cut = blocks(self.inputs, separator, BLOCK_BYTES)
            pairs = _pairs(islice(cut, progress.next_block, None), pool)
            while True:
                size = min(2 ** len(progress.num_sequences), _MOST_BLOCKS)
                part = list(self._encoded(islice(pairs, size)))
                if not part:
                    break
                try:
                    self._write_shard(part)
                except OSError:
                    # On a full disk, the record of the error needs the space.
                    for unfinished in Path(source.directory).glob("*.tmp"):
                        unfinished.unlink()
                    raise
                yield
        progress.is_complete = True
        progress.write(source.directory)

    def _encoded(self, pairs: Iterator[tuple[Block, EncodedBlock]]) -> Iterator[EncodedBlock]:
        progress = self.progress
        for block, encoded in pairs:
            assert isinstance(encoded, _TolerantBlock), "the encoder is a _TolerantEncoder"
            for newlines, reason in encoded.bad_lines:
                progress.num_bad_lines += 1
                if len(progress.bad_lines) < _NAMED_LINES:
                    line = locate(BadRecord(block, newlines, reason))
                    progress.bad_lines.append(f"{block.path}, line {line}: {reason}")
                    print(f"left out: {progress.bad_lines[-1]}", flush=True)
            yield encoded

    def _write_shard(self, part: Sequence[EncodedBlock]) -> None:
        progress = self.progress
        directory = self.source.directory
        number = len(progress.num_sequences)
        prefix = shard_prefix(directory, number)
        builder = IndexedDatasetBuilder(get_bin_path(prefix), self.dtype)
        for encoded in part:
            builder.add_documents(*encoded.texts[self.source.text_key])
            progress.num_documents += encoded.num_documents
        if progress.bad_lines and not progress.num_documents:
            raise DataError(
                f"no record of its first {len(part)} blocks is usable: {progress.bad_lines[0]}"
            )
        builder.finalize(get_idx_path(prefix))
        progress.num_sequences.append(len(IndexedDataset(prefix)))
        progress.next_block += len(part)
        progress.write(directory)
        print(f"{directory}: shard {number}, {progress.num_documents} documents", flush=True)


def _pairs(cut: Iterator[Block], pool: WorkerPool) -> Iterator[tuple[Block, EncodedBlock]]:
    """Yield each block, without its data, and its result."""
    sent: list[Block] = []

    def remembered() -> Iterator[Block]:
        for block in cut:
            sent.append(replace(block, data=None))
            yield block

    for encoded in pool.map(remembered()):
        yield sent.pop(0), encoded


def tokenize(
    sources: Sequence[CorpusSource], tokenizer: MegatronTokenizer, num_workers: int
) -> None:
    """Write the shards of all sources in turn, so that each has some early.

    Waits for a source that another process writes, and continues where that one ended.  An error
    is recorded for its readers.
    """
    left = [(source, _shards_of(source, tokenizer, num_workers)) for source in sources]
    while left:
        left = [(source, shards) for source, shards in left if _goes_on(source, shards)]


def _shards_of(
    source: CorpusSource, tokenizer: MegatronTokenizer, num_workers: int
) -> Iterator[None]:
    with open(os.path.join(source.directory, "lock"), "wb") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(_POLL_S)
                yield
        progress = CorpusProgress.read(source.directory)
        if progress is None or not progress.is_complete:
            with source.local_inputs() as inputs:
                yield from _Writer(source, tokenizer, num_workers, inputs).shards()


def _goes_on(source: CorpusSource, shards: Iterator[None]) -> bool:
    """Write one shard; return False after the last, and after an error, which is recorded."""
    try:
        return next(shards, StopIteration) is None
    except (MegatronError, OSError, MemoryError) as error:
        _record_error(source, str(error))
        return False
    except Exception as error:  # the readers would wait for a process that is gone
        _record_error(source, repr(error))
        raise


def _record_error(source: CorpusSource, text: str) -> None:
    progress = CorpusProgress.read(source.directory) or CorpusProgress(key=source.key())
    progress.error = text
    progress.error_at_s = time.time()
    progress.write(source.directory)
    print(f"{source.path}: {text}", flush=True)


def _give_signs(directories: Sequence[str]) -> None:
    """Touch the files that say that this process lives, also while a block takes minutes."""
    while True:
        for directory in directories:
            with suppress(OSError):  # of a full disk, for example, which may pass
                Path(alive_path(directory)).touch()
        time.sleep(_SIGN_S)


def main(argv: Sequence[str]) -> None:
    """Entry point of the process; its argument is the job of `start` as JSON."""
    job: Mapping[str, Any] = json.loads(argv[0])
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: end with rank 0
    if os.getppid() != job["parent"]:
        return
    sources = [CorpusSource(**{**s, "inputs": tuple(s["inputs"])}) for s in job["sources"]]
    directories = [source.directory for source in sources]
    Thread(target=_give_signs, args=(directories,), daemon=True).start()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    tokenize(sources, create_tokenizer(TokenizerSpec(**job["tokenizer"])), job["num_workers"])


if __name__ == "__main__":
    main(sys.argv[1:])
