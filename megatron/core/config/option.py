"""A command-line flag declared on the dataclass field it sets.

``option()`` attaches plain data to a field and knows nothing of argparse, so that the library may
use it; ``megatron.training.arguments`` turns the data into a parser and a parsed namespace back
into frozen configs.  A flag is in one of three states: implemented (the default), ``refused``
(asking for it stops the run with a sentence) or ``ignored`` (asking for it prints one warning).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

_KEY = "option"
SAME = object()  # the command line's default is the field's default
INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
MAX_LAYERS = 100_000  # far more than any model has; plans and checks list the layers


@dataclass(frozen=True)
class Option:
    """How one field is spelt on the command line."""

    # What giving the flag does: for a field that is on by default, what switching it off does.
    help: str
    group: str  # heading in --help
    flag: str | None = None  # None: derived from the field name
    aliases: tuple[str, ...] = ()
    dest: str | None = None  # None: the field name; else the attribute of the parsed namespace
    default: object = SAME  # where the command line differs from the library
    choices: Collection[object] | None = None
    nargs: str | None = None
    parse: Callable[[str], object] | None = None  # where the annotation does not say it
    at_least: int | None = 0  # of a number; None: no minimum
    at_most: int = INT32_MAX  # of an integer
    infinite: bool = False  # whether a float may be infinite
    inverted: bool = False  # the flag switches a field that is on by default off
    both_ways: bool = False  # a switch spelt --x and --no-x
    repeatable: bool = False  # may be given several times; the values add up
    refused: str | None = None  # why the run cannot have it, and what to use
    harmless: tuple[object, ...] = ()  # values of a refused or ignored flag that ask for nothing
    # Value -> why the run cannot have it, and what to use.
    refused_values: Mapping[object, str] = field(default_factory=dict)
    ignored: str | None = None  # why it changes nothing here


def option(value: object, help: str, /, *, group: str, **spelling: Any) -> Any:
    """A dataclass field that is also a flag.  ``value`` is its default, immutable."""
    return field(default=value, metadata={_KEY: Option(help=help, group=group, **spelling)})


def options_of(config_class: type) -> list[tuple[dataclasses.Field[object], Option]]:
    """The fields of ``config_class`` that are flags, inherited ones first."""
    return [(f, f.metadata[_KEY]) for f in fields(config_class) if _KEY in f.metadata]


def flag_of(f: dataclasses.Field[object], opt: Option) -> str:
    """``--field-name``, or ``--no-field-name`` for a switch that is on by default."""
    if opt.flag is not None:
        return opt.flag
    stem = f.name.replace("_", "-")
    return f"--no-{stem}" if f.default is True else f"--{stem}"


def dest_of(f: dataclasses.Field[object], opt: Option) -> str:
    """The attribute of the parsed namespace that holds the value."""
    return opt.dest or f.name


def cli_default(f: dataclasses.Field[object], opt: Option) -> object:
    """What the parsed namespace holds when the flag is not given."""
    return f.default if opt.default is SAME else opt.default
