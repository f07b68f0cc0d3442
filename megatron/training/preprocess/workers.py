"""Worker processes that encode blocks; results have the order of the blocks.

Workers are forked after everything is loaded, so nothing is loaded twice.  At most ``_WINDOW``
blocks per worker are in progress or waiting, which bounds memory.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import signal
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from datetime import timedelta

from megatron.core.config.errors import DataError, MegatronError
from megatron.core.rank_local import each_rank_owns
from megatron.training.preprocess.documents import BadRecord
from megatron.training.preprocess.encode import BlockEncoder, EncodedBlock
from megatron.training.preprocess.inputs import Block

_SHORTEST_S = 0.5  # minimum time between two lines


class Progress:
    """Counter of documents and bytes; prints at most once per ``log_interval`` documents."""

    def __init__(self, total_stored_bytes: int, log_interval: int) -> None:
        self._total_stored = total_stored_bytes
        self._log_interval = log_interval
        self._stored = self._bytes = self.num_documents = 0
        self._printed_documents = 0
        self._started_at_s = self._printed_at_s = time.monotonic()

    def add(self, num_documents: int, num_bytes: int, stored_bytes: int) -> None:
        """Count documents, their bytes of text, and the bytes on disk that they occupy."""
        self.num_documents += num_documents
        self._bytes += num_bytes
        self._stored += stored_bytes
        waited = self.num_documents - self._printed_documents >= self._log_interval
        if waited and time.monotonic() - self._printed_at_s >= _SHORTEST_S:
            self._printed_documents = self.num_documents
            self._printed_at_s = time.monotonic()
            self.print()

    def print(self) -> None:
        """Print a line with documents, rates, percentage and remaining time."""
        elapsed_s = max(time.monotonic() - self._started_at_s, 1e-9)
        share = self._stored / self._total_stored if self._total_stored else 1.0
        left_s = round(elapsed_s * (1 - share) / share) if share else 0
        print(
            f"Processed {self.num_documents} documents "
            f"({self.num_documents / elapsed_s:.1f} docs/s, "
            f"{self._bytes / 1e6 / elapsed_s:.2f} MB/s), {100 * share:.1f} %, "
            f"{timedelta(seconds=left_s)} left",
            file=sys.stderr,
            flush=True,
        )


_WINDOW = 4  # blocks per worker in progress, or waiting for an earlier block
_SIGNAL_OF_DEAD_PARENT = 1  # PR_SET_PDEATHSIG of prctl


class WorkerPool:
    """Context manager of worker processes: they end when the ``with`` block ends."""

    def __init__(self, encoder: BlockEncoder, num_workers: int) -> None:
        fork = multiprocessing.get_context("fork")
        self._pool = ProcessPoolExecutor(num_workers, fork, _begin, (encoder,))
        self._num_blocks = _WINDOW * num_workers

    def __enter__(self) -> WorkerPool:
        self._pool.submit(int)  # the first call forks all workers
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def map(self, blocks: Iterable[Block]) -> Iterator[EncodedBlock]:
        """Yield encoded ``blocks`` in order.  Raises the first error of a worker."""
        waiting: deque[Future[EncodedBlock]] = deque()
        try:
            for block in blocks:
                waiting.append(self._pool.submit(_encode, block))
                if len(waiting) == self._num_blocks:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool as error:
            raise DataError(
                "a worker process was ended by a signal; if memory ran out, use fewer --workers"
            ) from error


_encoder: BlockEncoder | None = None  # of a worker
each_rank_owns(__name__, "_encoder")


def _begin(encoder: BlockEncoder) -> None:
    """Begin a worker: it inherits ``encoder``, and ends with the main process."""
    global _encoder
    _encoder = encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process ends its workers
    ctypes.CDLL(None).prctl(_SIGNAL_OF_DEAD_PARENT, signal.SIGKILL)


def _encode(block: Block) -> EncodedBlock:
    assert _encoder is not None
    try:
        return _encoder.encode(block)
    except BadRecord:
        raise
    except MegatronError as error:
        place = f"{block.path}, bytes {block.start} to {block.end}"
        raise DataError(f"{place}: {error}") from error
