"""Iterator that can return the micro-batches of a step again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast


class RerunDataIterator:
    """Iterator over ``iterable`` that keeps what it returned since the last `advance`."""

    def __init__(self, iterable: Iterable[Any]) -> None:
        self.iterable = iterable
        self.saved_microbatches: list[Any] = []
        self._keeps = True
        self._position = 0  # in saved_microbatches; at its end new ones are read
        self._iterator: Iterator[Any] | None = None

    def __iter__(self) -> RerunDataIterator:
        return self

    def __next__(self) -> Any:
        if self._position < len(self.saved_microbatches):
            self._position += 1
            return self.saved_microbatches[self._position - 1]
        batch = self._read_next()
        if self._keeps:
            self.saved_microbatches.append(batch)
            self._position += 1
        return batch

    def rewind(self) -> None:
        """Return again what was returned since the last `advance`, then go on."""
        self._position = 0

    def advance(self) -> None:
        """Begin a step: forget what was returned so far; the next `rewind` goes back here."""
        self._keeps = True
        del self.saved_microbatches[: self._position]
        self._position = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the micro-batches since the last `advance`."""
        return {"saved_microbatches": list(self.saved_microbatches)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Return the micro-batches of `state_dict` first, then go on."""
        self.saved_microbatches = list(state_dict["saved_microbatches"])
        self._position = 0

    def _read_next(self) -> Any:
        if self._iterator is None:
            is_iterator = hasattr(self.iterable, "__next__")
            self._iterator = (
                cast(Iterator[Any], self.iterable) if is_iterator else iter(self.iterable)
            )
        return next(self._iterator)
