"""Report the progress of preprocessing on stderr."""

from __future__ import annotations

import sys
import time

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
        now_s = time.monotonic()
        waited = self.num_documents - self._printed_documents >= self._log_interval
        if waited and now_s - self._printed_at_s >= _SHORTEST_S:
            self._printed_documents, self._printed_at_s = self.num_documents, now_s
            print(self.line(now_s), file=sys.stderr, flush=True)

    def line(self, now_s: float) -> str:
        """Return a line with documents, rates, percentage and remaining time."""
        elapsed_s = max(now_s - self._started_at_s, 1e-9)
        share = self._stored / self._total_stored if self._total_stored else 1.0
        left_s = elapsed_s * (1 - share) / share if share else 0.0
        return (
            f"Processed {self.num_documents} documents "
            f"({self.num_documents / elapsed_s:.1f} docs/s, "
            f"{self._bytes / 1e6 / elapsed_s:.2f} MB/s), {100 * share:.1f} %, "
            f"{_clock(left_s)} left"
        )

    def finish(self) -> None:
        """Print the last line."""
        print(self.line(time.monotonic()), file=sys.stderr, flush=True)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
