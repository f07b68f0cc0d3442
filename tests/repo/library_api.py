"""Compare the library with Megatron Core's public API, as `library_api.json` records it.

The record has the names that public projects import, with the projects and their number of files,
and the signatures and fields of those that core_v0.14 has.  Run this file to print what differs:
``python -m tests.repo.library_api [part of a name]``.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import json
import sys
from collections.abc import Iterator

from tests.repo.source import ROOT

_RECORD = json.loads((ROOT / "tests/golden/library_api.json").read_text())
NAMES = _RECORD["names"]  # "module:name" -> {"files": {project: number}, "release": ...}
API = _RECORD["api"]  # "module:name" -> its signature, methods and fields in core_v0.14

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def differences() -> dict[str, str]:
    """Return what differs: "module:name" or "module:name.member" -> a sentence."""
    found = {}
    for place, entry in NAMES.items():
        if entry["release"] == "v0.14" and (reason := missing(place)):
            found[place] = reason
    for place, recorded in API.items():
        if place not in found:
            module, _, name = place.partition(":")
            thing = getattr(importlib.import_module(module), name)
            found |= {f"{place}{member}": text for member, text in _compared(thing, recorded)}
    return found


def missing(place: str) -> str | None:
    """Return why "module:name" cannot be imported, or None."""
    module, _, name = place.partition(":")
    try:
        if hasattr(importlib.import_module(module), name):
            return None
        importlib.import_module(f"{module}.{name}")
    except ModuleNotFoundError as error:
        return f"does not exist: {error}"
    return None


def _compared(thing: object, recorded: dict) -> Iterator[tuple[str, str]]:
    if "def" in recorded:
        for text in signature_problems(recorded["def"], thing):
            yield "", text
    for name, signature in recorded.get("methods", {}).items():
        if name == "__init__":
            problems = [] if "fields" in recorded else signature_problems(signature, thing)
        else:
            problems = _member_problems(thing, name, signature)
        if problems:
            yield f".{name}", "; ".join(problems)
    fields = getattr(thing, "__dataclass_fields__", {})
    for name, default in recorded.get("fields", {}).items():
        if name not in fields and not hasattr(thing, name):
            yield f".{name}", f"has no such field, whose default is {default}"
        elif name in fields and (text := _default_problem(fields[name], default)):
            yield f".{name}", text


def _member_problems(thing: object, name: str, signature: str) -> list[str]:
    member = inspect.getattr_static(thing, name, None)
    if member is None:
        return [f"has no such method: {signature}"]
    if isinstance(member, staticmethod):
        return signature_problems(signature, member.__func__)
    if isinstance(member, classmethod):
        return signature_problems(
            signature.replace("(cls, ", "(").replace("(cls)", "()"), getattr(thing, name)
        )
    return signature_problems(signature, member, is_method=True) if callable(member) else []


def signature_problems(recorded: str, thing: object, is_method: bool = False) -> list[str]:
    """Return why calls that ``recorded`` accepts may fail for ``thing``."""
    wanted = ast.parse(f"def f{recorded}: pass").body[0].args
    positional = [a.arg for a in (*wanted.posonlyargs, *wanted.args)]
    required = {*positional[: len(positional) - len(wanted.defaults)]}
    keywords = zip(wanted.kwonlyargs, wanted.kw_defaults, strict=True)
    required |= {a.arg for a, default in keywords if default is None}
    wanted_names = [*positional, *(a.arg for a in wanted.kwonlyargs)]
    try:
        own = [*inspect.signature(thing).parameters.values()]
    except (TypeError, ValueError) as error:
        return [f"has no signature: {error}"]
    own = own[1:] if is_method and own and own[0].kind in _POSITIONAL else own
    places = [p.name for p in own if p.kind in _POSITIONAL]
    names = {p.name for p in own if p.kind in _NAMED}
    takes_args, takes_kwargs = (
        any(p.kind is k for p in own)
        for k in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    )
    problems = []
    for number, (name, place) in enumerate(zip(positional, places, strict=False)):
        if name != place:
            problems.append(f"argument {number} is {place}, not {name}")
            break
    else:
        if len(positional) > len(places) and not takes_args:
            problems.append(f"{positional[len(places)]} is not positional")
    absent = [name for name in wanted_names if name not in names]
    if absent and not takes_kwargs:
        problems.append(f"does not accept {', '.join(absent)}")
    extra = [p.name for p in own if p.default is p.empty and p.kind in (*_POSITIONAL, *_NAMED)]
    if extra := [name for name in extra if name not in required]:
        problems.append(f"requires {', '.join(extra)}")
    return problems


def _default_problem(field: dataclasses.Field, recorded: object) -> str | None:
    """Return how the default of a field differs; recorded factories and code are not compared."""
    if recorded is None:
        is_same = field.default is None or field.default is dataclasses.MISSING
    elif isinstance(recorded, str) and recorded.startswith(("field(", "lambda", "Identity")):
        is_same = True
    elif recorded == "F.gelu":
        is_same = field.default.__name__ == "gelu"
    else:
        text = str(recorded)
        if text[:1] not in "'\"" and not text.startswith(("torch.", "AttnBackend", "Fp8Recipe")):
            text = str(eval(text, {}))  # noqa: S307  (a number of the record, such as 2 ** 32)
        own = field.default
        is_same = str(own) == text.strip("'\"") or own == _number(text)
    return None if is_same else f"has the default {field.default}, not {recorded}"


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


if __name__ == "__main__":
    part = sys.argv[1] if len(sys.argv) > 1 else ""
    for place, text in differences().items():
        if part in place:
            print(f"{place}: {text}")
