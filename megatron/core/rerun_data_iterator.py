"""Iterator that can return the micro-batches of a step again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast


class RerunDataIterator:
    """Iterator over ``iterable`` that keeps what it returned since the last `advance`.

    With ``advance(keeps_last=True)`` it also keeps what it returned in the step before.
    """

    def __init__(self, iterable: Iterable[Any]) -> None:
        self.iterable = iterable
        self.saved_microbatches: list[Any] = []
        self._keeps = True
        self._position = 0  # in saved_microbatches; at its end new ones are read
        self._start = 0  # of the running step in saved_microbatches
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
        self._position = self._start

    def advance(self, *, keeps_last: bool = False) -> None:
        """Begin a step: the next `rewind` goes back to this point.

        Forgets what was returned so far, with ``keeps_last`` only what was returned before the
        step that ends, so that `rewind_last` is possible until `forget_last`.
        """
        self._keeps = True
        first = self._start if keeps_last else self._position
        del self.saved_microbatches[:first]
        self._start = self._position = self._position - first

    def rewind_last(self) -> None:
        """Return again what the step before returned, then what this step returned, then go on."""
        self._start = self._position = 0

    def forget_last(self) -> None:
        """Forget what the step before returned."""
        del self.saved_microbatches[: self._start]
        self._position -= self._start
        self._start = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the micro-batches since the last `advance`."""
        return {"saved_microbatches": self.saved_microbatches[self._start :]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Return the micro-batches of `state_dict` first, then go on."""
        self.saved_microbatches = list(state_dict["saved_microbatches"])
        self._start = self._position = 0

    def _read_next(self) -> Any:
        if self._iterator is None:
            is_iterator = hasattr(self.iterable, "__next__")
            self._iterator = (
                cast(Iterator[Any], self.iterable) if is_iterator else iter(self.iterable)
            )
        return next(self._iterator)
