"""Read the fields of a JSON object from a client, each with its type and range.

Every function raises ApiError, which names the field, the value found and what fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias, TypeVar

from megatron.inference.server.errors import ApiError

Body: TypeAlias = Mapping[str, Any]
T = TypeVar("T")

_SHOWN = 80  # characters of a value in an error message


class Fields:
    """Fields of ``body``; each may be null, which is its default.

    `refuse_others` refuses those that nobody has read.
    """

    def __init__(self, body: Body, prefix: str = "") -> None:
        self._body = body
        self._prefix = prefix
        self._read: set[str] = set()

    def get(self, name: str) -> Any:
        """Return the value, or None."""
        self._read.add(name)
        return self._body.get(name)

    def path(self, name: str) -> str:
        """Return the field's name with those of the objects around it."""
        return f"{self._prefix}.{name}" if self._prefix else name

    def fail(self, name: str, reason: str) -> ApiError:
        """Return the error for a field whose value does not fit."""
        shown = repr(self._body.get(name))
        shown = shown if len(shown) <= _SHOWN else shown[:_SHOWN] + "..."
        return ApiError(f"{self.path(name)}: {shown} is invalid: {reason}", self.path(name))

    def integer(self, name: str, default: T, low: int, high: int) -> int | T:
        """Read an integer from ``low`` to ``high``."""
        value = self.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.fail(name, f"give an integer from {low} to {high}")
        return value

    def number(self, name: str, default: float, low: float, high: float) -> float:
        """Read a finite number from ``low`` to ``high``."""
        value = self.get(name)
        if value is None:
            return default
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not low <= value <= high:  # false for NaN
            raise self.fail(name, f"give a number from {low:g} to {high:g}")
        return float(value)

    def boolean(self, name: str, default: bool = False) -> bool:
        """Read true or false."""
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fail(name, "give true or false")
        return value

    def text(self, name: str, default: T) -> str | T:
        """Read a string that UTF-8 can encode."""
        value = self.get(name)
        return default if value is None else self.check_text(name, value)

    def check_text(self, name: str, value: object) -> str:
        """Return ``value`` if it is a string that UTF-8 can encode."""
        if not isinstance(value, str):
            raise self.fail(name, "give a string")
        if not value.isascii() and any("\ud800" <= c <= "\udfff" for c in value):
            raise self.fail(name, "it has half of a surrogate pair, which is no character")
        return value

    def choice(self, name: str, default: str, choices: Iterable[str]) -> str:
        """Read one of some strings."""
        value = self.text(name, default)
        if value not in choices:
            raise self.fail(name, f"give one of {', '.join(choices)}")
        return value

    def list_of(self, name: str, check: Callable[[str, object], T], most: int) -> list[T]:
        """Read a list of at most ``most`` items; empty if it is missing."""
        value = self.get(name)
        if value is None:
            return []
        if not isinstance(value, list) or len(value) > most:
            raise self.fail(name, f"give a list of at most {most} items")
        return [check(name, item) for item in value]

    def sub_object(self, name: str) -> Fields | None:
        """Read an object; its fields must be read too."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.fail(name, "give an object")
        return Fields(value, self.path(name))

    def token_id(self, vocab_size: int) -> Callable[[str, object], int]:
        """Return a check for items of a list: ids below ``vocab_size``."""

        def check(name: str, value: object) -> int:
            is_id = isinstance(value, int) and not isinstance(value, bool)
            if not is_id or not 0 <= value < vocab_size:  # type: ignore[operator]
                raise self.fail(name, f"token ids are integers from 0 to {vocab_size - 1}")
            return value  # type: ignore[return-value]

        return check

    def without_effect(self, names: Iterable[str]) -> list[str]:
        """Return those of ``names`` that are given; they count as read."""
        return [name for name in names if self.get(name) is not None]

    def refuse_others(self) -> None:
        """Raise ApiError for a field that was not read."""
        for name in self._body:
            if name not in self._read:
                shown = self.path(name[:_SHOWN])
                raise ApiError(f"{shown}: this server has no such field; leave it out", shown)


def log_prob_of(value: float) -> float:
    """Return a log-probability that JSON can hold: minus infinity is -9999."""
    return value if math.isfinite(value) else -9999.0
