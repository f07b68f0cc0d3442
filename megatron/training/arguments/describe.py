"""Compose the text for one flag in --help and docs/flags.md."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

from megatron.core.config.option import Option
from megatron.training.arguments.options import namespace_default


def state(opt: Option) -> str:
    """Return the state of a flag: implemented, refused or ignored."""
    if opt.refused is not None:
        return "refused"
    return "ignored" if opt.ignored is not None else "implemented"


def default_text(f: dataclasses.Field[Any], opt: Option) -> str:
    """Return the default as a user would type it; "" for None, empty lists and switches."""
    value = namespace_default(f, opt)
    if value is None or isinstance(value, bool) or value == "" or value == []:
        return ""
    if isinstance(value, list):
        return " ".join(str(v) for v in value)
    return value.name if isinstance(value, enum.Enum) else str(value)


def state_text(opt: Option) -> str:
    """Return why the flag or some of its values are refused or ignored; "" if none are."""
    if opt.refused is not None:
        return f"Refused: {opt.refused}."
    parts = [f"Refused for {value}: {why}." for value, why in opt.refused_values.items()]
    if opt.ignored is not None:
        parts.append(f"Without effect: {opt.ignored}.")
    return " ".join(parts)


def help_line(f: dataclasses.Field[Any], opt: Option) -> str:
    """Return the help text of the flag, with its default and its state."""
    default = default_text(f, opt)
    parts = [opt.help, f"Default {default}." if default else "", state_text(opt)]
    return " ".join(part for part in parts if part)
