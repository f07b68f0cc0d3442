"""Worker processes that encode blocks; results have the order of the blocks.

Workers are forked after everything is loaded, so nothing is loaded twice.  Each has a pipe that
carries blocks to it and arrays back.  At most ``_WINDOW`` blocks per worker are in progress or
waiting, which bounds memory.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import cast

from megatron.core.config.errors import DataError, MegatronError
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
            self._printed_documents, self._printed_at_s = self.num_documents, time.monotonic()
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


class WorkerPool:
    """Context manager of worker processes: they end when the ``with`` block ends."""

    def __init__(self, encoder: BlockEncoder, num_workers: int) -> None:
        self._encoder = encoder
        self._num_workers = num_workers
        self._workers: list[tuple[BaseProcess, Connection]] = []

    def __enter__(self) -> WorkerPool:
        context = multiprocessing.get_context("fork")
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for _ in range(self._num_workers):
            ours, theirs = context.Pipe()
            inherited = [ours, *(connection for _, connection in self._workers)]
            process = context.Process(
                target=_serve, args=(theirs, inherited, self._encoder), daemon=True
            )
            process.start()
            theirs.close()
            self._workers.append((process, ours))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for process, connection in self._workers:
            connection.close()  # an idle worker sees the end of the pipe and exits
            if kind is not None:
                process.terminate()
        for process, _connection in self._workers:
            process.join()

    def map(self, blocks: Iterator[Block]) -> Iterator[EncodedBlock]:
        """Yield encoded ``blocks`` in order.  Raises the first error of a worker."""
        idle = [connection for _, connection in self._workers]
        busy: dict[Connection, int] = {}
        done: dict[int, EncodedBlock] = {}
        num_sent = num_given = 0
        while True:
            while idle and num_sent - num_given < _WINDOW * self._num_workers:
                if (block := next(blocks, None)) is None:
                    break
                connection = idle.pop()
                busy[connection] = num_sent
                with self._deaths():
                    connection.send(block)
                num_sent += 1
            if num_given in done:
                yield done.pop(num_given)
                num_given += 1
            elif busy:
                for connection in cast(list[Connection], wait(list(busy))):
                    with self._deaths():
                        result = connection.recv()
                    if isinstance(result, MegatronError):
                        raise result
                    done[busy.pop(connection)] = result
                    idle.append(connection)
            else:
                return

    @contextmanager
    def _deaths(self) -> Iterator[None]:
        """Raise an error that names a worker which has ended, if its pipe has."""
        try:
            yield
        except (EOFError, BrokenPipeError, ConnectionResetError) as error:
            ended = wait([process.sentinel for process, _ in self._workers])
            process = next(p for p, _ in self._workers if p.sentinel in ended)
            process.join()
            code = process.exitcode or 0
            if code >= 0:
                raise RuntimeError("a worker failed; its traceback stands above") from error
            raise DataError(
                f"worker process {process.pid} was ended by {signal.Signals(-code).name}; if "
                "memory ran out, use fewer --workers"
            ) from error


def _serve(connection: Connection, inherited: list[Connection], encoder: BlockEncoder) -> None:
    """Encode blocks until the pipe is closed.

    First close the ends of other workers' pipes, whose copies in this process would keep them open.
    """
    for other in inherited:
        other.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process ends its workers
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            block = connection.recv()
            try:
                result: EncodedBlock | MegatronError = encoder.encode(block)
            except BadRecord as error:
                result = error
            except MegatronError as error:
                result = DataError(f"{block.path}, bytes {block.start} to {block.end}: {error}")
            connection.send(result)
