"""The fields of a JSON object from a client, each with its type and range, and the errors of them.

Every function raises ApiError, which names the field, the value found and the values that fit.  The
answer is {"error": {message, type, param, code}, "message": ...}: the first is OpenAI's object, the
second is printed by clients of Megatron-LM's server.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias, TypeVar

import numpy as np

from megatron.core.config.errors import ConfigError, MegatronError
from megatron.core.inference.paged_engine.request import QueueFullError, RequestError

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(MegatronError):
    """An answer with ``status``; ``param`` names the field of the request to change.

    ``is_last``: the connection ends after it.
    """

    def __init__(
        self,
        message: str,
        param: str | None = None,
        *,
        status: int = 400,
        code: str | None = None,
        retry_after_s: int | None = None,
        is_last: bool = False,
    ) -> None:
        # Names of fields come from the client and may have half of a surrogate pair, which no
        # answer can be encoded with.
        message = message.encode("utf-8", "backslashreplace").decode()
        param = param and param.encode("utf-8", "backslashreplace").decode()
        super().__init__(message)
        self.message = message
        self.param = param
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s
        self.is_last = is_last

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object of the answer."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, kind),
                "param": self.param,
                "code": self.code,
            },
            "message": self.message,
        }

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the answer."""
        if self.is_last:
            return {"Connection": "close"}
        if self.retry_after_s is not None:
            return {"Retry-After": str(self.retry_after_s)}
        return {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}


def as_api_error(error: MegatronError) -> ApiError:
    """Return the answer for an error of the engine or of a field."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFullError):
        return ApiError(str(error), status=429, code="queue_full", retry_after_s=1)
    if isinstance(error, RequestError):
        param = "response_format" if error.param == "grammar" else error.param
        return ApiError(str(error), param)
    if isinstance(error, ConfigError):
        return ApiError(str(error))
    return ApiError(str(error), status=500)


Body: TypeAlias = Mapping[str, Any]
T = TypeVar("T")

_SHOWN = 80  # characters of a value in an error message
_MAX_DEPTH = 100  # objects and lists around a value; below every limit of recursion
_MAX_CONTAINERS = 1 << 16  # objects and lists of one text: each costs time in Python
_MAX_NAMES = 1 << 17  # of fields in them


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
        """Return the field's name after the names of the objects around it."""
        return f"{self._prefix}.{name}" if self._prefix else name

    def fail(self, name: str, reason: str) -> ApiError:
        """Return the error for a field whose value does not fit."""
        shown = _shown(self._body.get(name))
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
        """Read a string."""
        value = self.get(name)
        return default if value is None else self.check_text(name, value)

    def check_text(self, name: str, value: object) -> str:
        """Return ``value`` if it is a string."""
        if not isinstance(value, str):
            raise self.fail(name, "give a string")
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

    def token_ids(self, name: str, value: object, vocab_size: int, most: int) -> list[int]:
        """Return ``value`` if it is a list of at most ``most`` token ids.

        The checks run in C: a list of a million ids does not hold up other requests.
        """
        if not isinstance(value, list) or len(value) > most:
            raise self.fail(name, f"give a list of at most {most} token ids")
        is_ids = not value or (
            {*map(type, value)} == {int} and min(value) >= 0 and max(value) < vocab_size
        )
        if not is_ids:
            raise self.fail(name, f"token ids are integers from 0 to {vocab_size - 1}")
        return value

    def without_effect(self, names: Iterable[str]) -> list[str]:
        """Return the given fields among ``names``; they count as read."""
        return [name for name in names if self.get(name) is not None]

    def refuse_others(self) -> None:
        """Raise ApiError for a field that was not read."""
        for name in self._body:
            if name not in self._read:
                shown = self.path(name[:_SHOWN])
                raise ApiError(f"{shown}: this server has no such field; leave it out", shown)


def parse_json(data: bytes, name: str) -> Any:
    """Return the value of a JSON text; ``name``: of the text in error messages.

    Raises ApiError for text that later code could not handle: deep nesting, which exceeds the
    limit of recursion; very many objects; and half of a surrogate pair, which UTF-8 cannot encode.
    """
    _check_structure(data, name)
    try:
        found = json.loads(data.decode("utf-8"), parse_constant=_refuse_constant)
    except ValueError as error:
        raise ApiError(f"{name} is no JSON: {error}") from None
    if b"\\u" in data:  # other halves are no UTF-8
        for field, value in found.items() if isinstance(found, dict) else [(name, found)]:
            try:
                json.dumps([field, value], ensure_ascii=False).encode()
            except UnicodeEncodeError:
                reason = "it has half of a surrogate pair, which is no character"
                raise ApiError(f"{field[:_SHOWN]}: {reason}", field[:_SHOWN]) from None
    return found


def _check_structure(data: bytes, name: str) -> None:
    """Refuse deep nesting, and very many objects and fields, before the text is parsed."""
    if data.count(b"[") + data.count(b"{") <= _MAX_DEPTH and data.count(b":") <= _MAX_NAMES:
        return
    plain = data.replace(b"\\\\", b"").replace(b'\\"', b"")  # each other quote begins or ends text
    codes = np.frombuffer(plain, np.uint8)
    is_text = np.cumsum(codes == ord('"'), dtype=np.uint8) & 1
    codes = codes[is_text == 0]
    begins = (codes == ord("[")) | (codes == ord("{"))
    ends = (codes == ord("]")) | (codes == ord("}"))
    steps = begins.astype(np.int8) - ends.astype(np.int8)
    if begins.any() and int(np.cumsum(steps, dtype=np.int32).max()) > _MAX_DEPTH:
        raise ApiError(f"{name} is nested too deeply; at most {_MAX_DEPTH} levels are read")
    if int(begins.sum()) > _MAX_CONTAINERS:
        raise ApiError(f"{name} has more than {_MAX_CONTAINERS} objects and lists; send less")
    if int((codes == ord(":")).sum()) > _MAX_NAMES:
        raise ApiError(f"{name} has more than {_MAX_NAMES} fields; send less")


def _refuse_constant(word: str) -> float:
    raise ValueError(f"{word} is no JSON number")


def _shown(value: object) -> str:
    """Return the beginning of a value's repr, which never needs all of a long value."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = _SHOWN
    return short.repr(value)


def log_prob_of(value: float) -> float:
    """Return a log-probability that JSON can hold: minus infinity is -9999."""
    return value if math.isfinite(value) else -9999.0
