"""Declare a command-line flag on the dataclass field that it sets.

``option()`` attaches plain data to a field and does not use argparse, so that the library can call
it.  ``megatron.training.arguments`` builds the parser from this data, and configurations from a
parsed namespace.  A flag has one of three states: implemented (the default), ``refused`` (it stops
the run with an error message) or ``ignored`` (it prints one warning).  `library_field` declares a
field of Megatron Core that is not a flag.

This repository never assigns to a field of a config: ``dataclasses.replace`` makes a changed copy.
Projects that use the library do; `CheckedConfig` of `rule` checks their values.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any

_KEY = "option"
_LIBRARY_KEY = "library"
_NO_TEXT = re.compile(r"(int|float|bool|torch\.dtype|None|Callable\[.*\]|tuple\[.*\]| \| )+")
SAME = object()  # the command line's default is the field's default
INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
MAX_THREADS = 256  # worker processes or threads of a rank: each has a copy of much
MAX_LAYERS = 100_000  # far more than any model has; plans and checks list the layers


@dataclass(frozen=True)
class Option:
    """Command-line flag of one field."""

    # Effect of the flag; if the field is on by default, the effect of switching it off.
    help: str
    group: str  # heading in --help
    flag: str | None = None  # None: derived from the field name
    aliases: tuple[str, ...] = ()
    dest: str | None = None  # None: the field name; else the attribute of the parsed namespace
    default: object = SAME  # the command line's default, if it differs from the field's
    choices: Collection[object] | None = None
    nargs: str | None = None
    parse: Callable[[str], object] | None = None  # None: parse by the annotation of the field
    at_least: int | None = 0  # minimum of a number; None: no minimum
    at_most: int = INT32_MAX  # maximum of an integer
    infinite: bool = False  # whether a float may be infinite
    inverted: bool = False  # the flag switches a field that is on by default off
    both_ways: bool = False  # a switch spelt --x and --no-x
    repeatable: bool = False  # may be given several times; the values are concatenated
    refused: str | None = None  # why the flag is not available, and what to use instead
    harmless: tuple[object, ...] = ()  # accepted values of a refused or ignored flag (feature off)
    # Value -> why the value is not available, and what to use instead.
    refused_values: Mapping[object, str] = field(default_factory=dict)
    ignored: str | None = None  # why the flag has no effect


def option(value: object, help: str, /, *, group: str, **spelling: Any) -> Any:
    """Return a dataclass field that is also a flag; ``value``: its default, immutable.

    ``spelling``: further fields of `Option`.
    """
    return field(default=value, metadata={_KEY: Option(help=help, group=group, **spelling)})


@cache
def options_of(config_class: type) -> list[tuple[dataclasses.Field[object], Option]]:
    """Return the fields of ``config_class`` that are flags, inherited ones first."""
    return [(f, f.metadata[_KEY]) for f in fields(config_class) if _KEY in f.metadata]


def flag_of(f: dataclasses.Field[object], opt: Option) -> str:
    """Return the flag of a field.

    Default: ``--field-name``, or ``--no-field-name`` for a switch that is on by default.
    """
    if opt.flag is not None:
        return opt.flag
    stem = f.name.replace("_", "-")
    return f"--no-{stem}" if cli_default(f, opt) is True else f"--{stem}"


def dest_of(f: dataclasses.Field[object], opt: Option) -> str:
    """Return the attribute of the parsed namespace that stores the value."""
    return opt.dest or f.name


def cli_default(f: dataclasses.Field[object], opt: Option) -> object:
    """Return the value in the parsed namespace if the flag is not given."""
    return f.default if opt.default is SAME else opt.default


@dataclass(frozen=True)
class LibraryField:
    """Field of Megatron Core without a flag, and without effect in this project."""

    reason: str  # why it has no effect, or why other values than the default are refused
    is_refused: bool


def library_field(value: object, reason: str, /, *, refused: bool = False) -> Any:
    """Return a dataclass field that projects may set; ``refused``: to its default ``value`` only.

    Refused are fields whose other values would change results.
    """
    return field(default=value, metadata={_LIBRARY_KEY: LibraryField(reason, refused)})


@cache
def library_fields_of(config_class: type) -> list[tuple[dataclasses.Field[object], LibraryField]]:
    """Return the fields of ``config_class`` that have no effect."""
    known = ((f, f.metadata.get(_LIBRARY_KEY)) for f in fields(config_class))
    return [(f, entry) for f, entry in known if entry is not None]


def problem_of_value(f: dataclasses.Field[Any], value: object) -> str | None:
    """Return why a config cannot have ``value`` in field ``f``, or None."""
    if value is None or value is f.default or value == f.default:
        return None
    entry = f.metadata.get(_LIBRARY_KEY)
    opt = f.metadata.get(_KEY)
    if entry is not None and entry.is_refused:
        return f"{f.name} {value}: {entry.reason}"
    if isinstance(value, str) and isinstance(f.type, str) and _NO_TEXT.fullmatch(f.type):
        return f"{f.name} {value!r}: a value of type {f.type} is needed"
    if isinstance(value, int | float) and str(f.type).startswith(("tuple", "Callable")):
        return f"{f.name} {value}: a value of type {f.type} is needed"
    if opt is None:
        return None
    if opt.refused and value not in opt.harmless:
        return f"{f.name} {value}: {opt.refused}"
    for part in value if isinstance(value, list | tuple) else (value,):
        is_text = isinstance(part, str)  # others are members of an enum, or dtypes
        if is_text and opt.choices is not None and part not in opt.choices:
            return f"{f.name} {part}: use one of {', '.join(map(str, opt.choices))}"
        if problem := problem_of_range(part, opt):
            return f"{f.name} {part}: {problem}"
    return None


def problem_of_range(number: object, opt: Option) -> str | None:
    """Return why ``number`` is outside the range of a flag, or None; also for other values."""
    if isinstance(number, bool) or not isinstance(number, int | float):
        return None
    if opt.at_least is not None and number < opt.at_least and opt.parse is None:
        return f"at least {opt.at_least} is needed"
    is_limited = isinstance(number, int) or opt.at_most != INT32_MAX  # that of integers alone
    if is_limited and number > opt.at_most:
        return f"at most {opt.at_most} is possible"
    return None
