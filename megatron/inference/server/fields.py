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
    """An answer with ``status``; ``param`` names the field of the request to change."""

    def __init__(
        self,
        message: str,
        param: str | None = None,
        *,
        status: int = 400,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.param = param
        self.status = status
        self.code = code
        self.headers = headers
        kind = "server_error" if status >= 500 else "invalid_request_error"
        error = {"type": _TYPES.get(status, kind), "param": param, "code": code}
        self.body = {"error": {"message": message, **error}, "message": message}


def as_api_error(error: MegatronError) -> ApiError:
    """Return the answer for an error of the engine or of a field."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFullError):
        return ApiError(str(error), status=429, code="queue_full", headers={"Retry-After": "1"})
    if isinstance(error, RequestError):
        if error.param == "model":  # the adapter was unloaded after `Service.check_model`
            return ApiError(str(error), "model", status=404, code="model_not_found")
        param = "response_format" if error.param == "grammar" else error.param
        return ApiError(str(error), param)
    return ApiError(str(error), status=400 if isinstance(error, ConfigError) else 500)


def renamed(error: ApiError, names: Mapping[str, str]) -> ApiError:
    """Return an error about a field with the name that the field has in another API."""
    name, dot, rest = (error.param or "").partition(".")
    new = names.get(name)
    if new is None:
        return error
    message = str(error).replace(name, new, 1)
    return ApiError(message, new + dot + rest, status=error.status, code=error.code)


Body: TypeAlias = Mapping[str, Any]
T = TypeVar("T")

_SHOWN = 80  # characters of a value in an error message
# The repr of a long list would hold up the event loop: show the first items.
_SHORT = reprlib.Repr()
_SHORT.maxlevel = 3
_SHORT.maxstring = _SHOWN
_SHORT.maxlong = _SHOWN
_MAX_DEPTH = 100  # objects and lists around a value; below every limit of recursion
_MAX_CONTAINERS = 1 << 16  # objects and lists of one text: each costs time in Python
_MAX_NAMES = 1 << 17  # of fields in them


class Example(dict[str, Any]):
    """A body that is read to learn its fields: ``schema`` gets a JSON schema for each name.

    `Fields.refuse_others` then ends the reading with `FieldsKnown`.
    """

    def __init__(self, values: Body, schema: dict[str, Any] | None = None) -> None:
        super().__init__(values)
        self.schema: dict[str, Any] = {} if schema is None else schema


class FieldsKnown(Exception):
    """All fields of an `Example` have been read."""


class Fields:
    """Fields of ``body``; each may be null, which is its default.

    `refuse_others` refuses those that nobody has read.
    """

    def __init__(self, body: Body, prefix: str = "") -> None:
        self._body = body
        self._prefix = prefix
        self._read: set[str] = set()
        self._schema = body.schema if isinstance(body, Example) else None

    def get(self, name: str) -> Any:
        """Return the value, or None."""
        self._read.add(name)
        self._note(name)
        return self._body.get(name)

    def _note(self, name: str, kind: str = "", default: object = None, **schema: object) -> None:
        """Note the JSON schema of a field of an `Example`."""
        if self._schema is None:
            return
        noted = {**schema, "type": [kind, "null"]} if kind else schema
        noted |= {} if default is None else {"default": default}
        self._schema[name] = self._schema.get(name, {}) | noted

    def path(self, name: str) -> str:
        """Return the field's name after the names of the objects around it."""
        return f"{self._prefix}.{name}" if self._prefix else name

    def fail(self, name: str, reason: str) -> ApiError:
        """Return the error for a field whose value does not fit."""
        path = self.path(name)
        shown = _SHORT.repr(self._body.get(name))[:_SHOWN]
        return ApiError(f"{path}: {shown} is invalid: {reason}", path)

    def _checked(self, name: str, default: T, fits: Callable[[Any], bool], wanted: str) -> T:
        value: T | None = self.get(name)
        if value is None:
            return default
        if not fits(value):
            raise self.fail(name, f"give {wanted}")
        return value

    def integer(self, name: str, default: T, low: int, high: int) -> int | T:
        """Read an integer from ``low`` to ``high``."""
        wanted = f"an integer from {low} to {high}"
        self._note(name, "integer", default, minimum=low, maximum=high)
        return self._checked(name, default, lambda v: type(v) is int and low <= v <= high, wanted)

    def number(self, name: str, default: float, low: float, high: float) -> float:
        """Read a finite number from ``low`` to ``high``."""
        wanted = f"a number from {low:g} to {high:g}"
        self._note(name, "number", default, minimum=low, maximum=high)
        return float(self._checked(name, default, lambda v: low <= as_number(v) <= high, wanted))

    def boolean(self, name: str, default: bool = False) -> bool:
        """Read true or false."""
        self._note(name, "boolean", default)
        return self._checked(name, default, lambda v: type(v) is bool, "true or false")

    def text(self, name: str, default: T) -> str | T:
        """Read a string."""
        self._note(name, "string", default)
        return self._checked(name, default, lambda v: type(v) is str, "a string")

    def check_text(self, name: str, value: object) -> str:
        """Return ``value`` if it is a string."""
        if not isinstance(value, str):
            raise self.fail(name, "give a string")
        return value

    def choice(self, name: str, default: str, choices: Iterable[str]) -> str:
        """Read one of some strings."""
        value = self.text(name, default)
        self._note(name, enum=[*choices, None])
        if value not in choices:
            raise self.fail(name, f"give one of {', '.join(choices)}")
        return value

    def list_of(self, name: str, check: Callable[[str, object], T], most: int) -> list[T]:
        """Read a list of at most ``most`` items; empty if it is missing."""
        wanted = f"a list of at most {most} items"
        items = {"items": {"type": "string"}} if check == self.check_text else {}
        self._note(name, "array", maxItems=most, **items)
        value: list[Any] = self._checked(
            name, [], lambda v: type(v) is list and len(v) <= most, wanted
        )
        return [check(name, item) for item in value]

    def sub_object(self, name: str) -> Fields | None:
        """Read an object; its fields must be read too."""
        value = self._checked(name, None, lambda v: type(v) is dict, "an object")
        self._note(name, "object")
        if value is not None and self._schema is not None:
            value = Example(value)
            self._note(name, properties=value.schema, additionalProperties=False)
        return None if value is None else Fields(value, self.path(name))

    def token_ids(self, name: str, value: object, vocab_size: int, most: int) -> list[int]:
        """Return ``value`` if it is a list of at most ``most`` token ids.

        The checks run in C: a list of a million ids does not hold up other requests.
        """
        ids = {"type": "integer", "minimum": 0, "maximum": vocab_size - 1}
        self._note(name, items=ids, maxItems=most)
        if not isinstance(value, list) or len(value) > most:
            raise self.fail(name, f"give a list of at most {most} token ids")
        is_ids = not value or (
            {*map(type, value)} == {int} and min(value) >= 0 and max(value) < vocab_size
        )
        if not is_ids:
            raise self.fail(name, f"token ids are integers from 0 to {vocab_size - 1}")
        return value

    def refuse_others(self, ignored: Iterable[str] = ()) -> None:
        """Raise ApiError for a field that was not read, and is not one of those without effect."""
        for name in ignored:
            self._note(name)
        if self._schema is not None and not self._prefix:
            raise FieldsKnown
        for name in self._body:
            if name not in self._read and name not in ignored:
                raise self._unknown(name)

    def others(self, more: Body, refused: Iterable[str]) -> Body:
        """Return the fields that nobody has read, and ``more``; ``refused`` are unknown ones."""
        left = {name: value for name, value in self._body.items() if name not in self._read}
        for name in refused:
            if name in left:
                raise self._unknown(name)
        left |= {name: value for name, value in more.items() if value is not None}
        return left if self._schema is None else Example(left, self._schema)

    def _unknown(self, name: str) -> ApiError:
        path = self.path(name[:_SHOWN])
        return ApiError(f"{path}: this server has no such field; leave it out", path)


def as_number(value: Any) -> float:
    """Return a number of JSON; NaN, which fits in no range, for other values."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    return math.nan


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
                shown = field[:_SHOWN].encode("utf-8", "backslashreplace").decode()
                reason = "it has half of a surrogate pair, which is no character"
                raise ApiError(f"{shown}: {reason}", shown) from None
    return found


def _check_structure(data: bytes, name: str) -> None:
    """Refuse deep nesting, and very many objects and fields, before the text is parsed."""
    if data.count(b"[") + data.count(b"{") <= _MAX_DEPTH and data.count(b":") <= _MAX_NAMES:
        return
    plain = data.replace(b"\\\\", b"").replace(b'\\"', b"")  # each other quote begins or ends text
    codes = np.frombuffer(plain, np.uint8)
    codes = codes[np.cumsum(codes == ord('"'), dtype=np.uint8) & 1 == 0]  # outside of texts
    begins = np.isin(codes, (*b"[{",))
    depth = np.cumsum(begins.astype(np.int8) - np.isin(codes, (*b"]}",)), dtype=np.int32)
    for number, most, what in (
        (depth.max(initial=0), _MAX_DEPTH, "levels of nesting"),
        (begins.sum(), _MAX_CONTAINERS, "objects and lists"),
        ((codes == ord(":")).sum(), _MAX_NAMES, "fields"),
    ):
        if number > most:
            raise ApiError(f"{name} has more than {most} {what}; send less")


def _refuse_constant(word: str) -> float:
    raise ValueError(f"{word} is no JSON number")


def log_prob_of(value: float) -> float:
    """Return a log-probability that JSON can hold: minus infinity is -9999."""
    return value if math.isfinite(value) else -9999.0
