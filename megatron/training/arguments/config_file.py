"""Read configuration files (--config, --yaml-cfg) and write one beside each checkpoint.

A file maps dests to values.  A flag on the command line overrides the value of the file.  The key
``train`` names the program, as ``megatron-train NAME`` does.
`write_config` writes JSON, which is valid YAML, so that repeating a run does not need PyYAML.  Keys
that begin with an underscore are information for people; the reader skips them.
"""

from __future__ import annotations

import argparse
import enum
import json
import math
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from megatron.core.config.errors import ConfigError
from megatron.core.config.option import dest_of, options_of
from megatron.core.text_files import parse_yaml, read_text
from megatron.training.arguments.argument_parser import Parser
from megatron.training.arguments.config_keys import translate
from megatron.training.arguments.programs import PROGRAMS, name_of, problem_of, recipes
from megatron.training.arguments.sections import ALL_CLASSES, SECTIONS
from megatron.training.config.run import RunConfig
from megatron.training.models.registry import model_kind_of

# Headings under which Megatron-LM's YAML files nest their keys.
_HEADINGS = ("language_model", "model_parallel")


def write_config(config: RunConfig, path: str | os.PathLike[str]) -> None:
    """Write the requested flags of ``config``, complete, and the resolved values."""
    content = {
        "train": name_of(model_kind_of(config).entry_script, config.asked),
        "_world_size": config.world_size,
        **{dest: _plain(value) for dest, value in config.asked.items()},
        "_resolved": resolved_values(config),
    }
    Path(path).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def resolved_values(config: RunConfig) -> dict[str, dict[str, object]]:
    """Return all values of all sections in JSON types."""
    return {
        name: {f.name: _plain(vars(vars(config)[name])[f.name]) for f in fields(cls)}
        for name, cls in SECTIONS.items()
    }


def _plain(value: object) -> object:
    """Return ``value`` in JSON types; other objects become the text that the flag accepts."""
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    return getattr(value, "__name__", str(value))


def read_config_file(path: str, flag: str) -> dict[str, Any]:
    """Return the keys and values of the file of ``flag``; in YAML ``${VAR}`` is an environment
    variable.

    Raise ConfigError for a missing or unreadable file or an unset variable, MissingDependency if
    the file is YAML beyond JSON and PyYAML is missing.
    """
    what = f"{flag} {path}"
    file = path if Path(path).is_file() else recipes().get(path, path)
    text = read_text(file, what, ConfigError, "a YAML or JSON file of flags, or a recipe's name")
    try:
        content = _read_content(text, what)
        if not isinstance(content, dict):
            raise ConfigError(f"{what}: a mapping of flags to values is needed")
        return _flat(content)
    except RecursionError:
        raise ConfigError(
            f"{what}: not YAML: it is nested too deep; a mapping of flags to values is needed"
        ) from None


def _read_content(text: str, what: str) -> object:
    try:
        return json.loads(text)
    except ValueError:  # not JSON, or a number with more digits than Python reads
        return _read_yaml(text, what)


def _read_yaml(text: str, what: str) -> object:
    unset = sorted({name for name in re.findall(r"\$\{(\w+)\}", text) if name not in os.environ})
    if unset:
        raise ConfigError(f"{what}: environment variable {', '.join(unset)} is not set; export it")
    expanded = re.sub(r"\$\{(\w+)\}", lambda match: os.environ[match[1]], text)
    return parse_yaml(expanded, what, ConfigError)


def _flat(content: Mapping[str, object]) -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in content.items():
        name = str(key).lstrip("-").replace("-", "_")
        if name.startswith("_") and not str(key).startswith("-"):
            continue
        if name in _HEADINGS and isinstance(value, Mapping):
            flat.update(_flat(value))
        else:
            flat[name] = value
    return flat


def set_defaults_from(parser: Parser, content: Mapping[str, object], what: str) -> None:
    """Use the values of a file as defaults of ``parser``; add errors to its problems.

    ``what``: flag and path of the file.
    """
    actions: dict[str, argparse.Action] = {action.dest: action for action in parser._actions}
    # Name of a flag or field -> (dest, whether it sets the opposite), where it is not the dest.
    names = {
        flag.lstrip("-").replace("-", "_"): (action.dest, _switches_off(action, flag))
        for action in parser._actions
        for flag in action.option_strings
    } | {
        f.name: (dest_of(f, opt), opt.inverted)
        for cls in ALL_CLASSES
        for f, opt in options_of(cls)
        if dest_of(f, opt) != f.name
    }
    values, problems, warnings = translate(dict(content))
    name = values.pop("train", None)
    if name is not None:
        problems += filter(None, [problem_of(str(name), Path(sys.argv[0]).name)])
        values = {**(PROGRAMS[str(name)].settings if str(name) in PROGRAMS else {}), **values}
    parser.problems.extend(f"{what}: {problem}" for problem in problems)
    parser.warnings.extend(f"{what}: {warning}" for warning in warnings)
    for key, value in values.items():
        dest, inverted = (key, False) if key in actions else names.get(key, (key, False))
        if dest not in actions:
            parser.problems.append(f"{what}: {parser.unknown_dest(key)}")
            continue
        action = actions[dest]
        if inverted and isinstance(value, bool):
            value = not value
        action.default = _coerce(parser, action, value, what)
        action.required = False
        parser.given.setdefault(dest, False)


def _switches_off(action: argparse.Action, flag: str) -> bool:
    is_pair = isinstance(action, argparse.BooleanOptionalAction)
    return action.const is False or (is_pair and flag.startswith("--no-"))


def _coerce(parser: Parser, action: argparse.Action, value: object, what: str) -> object:
    """Convert ``value`` as the command line would; record an error instead of raising it."""
    is_switch = action.nargs == 0
    if value is None and not (is_switch and action.default is True):
        return action.default
    if value == action.default:
        return value
    if is_switch != isinstance(value, bool) and (is_switch or action.type in (None, int, float)):
        kind = "true or false" if is_switch else "a value"
        parser.problems.append(f"{what}: {action.dest}: {value!r} is not {kind}")
        return action.default
    if is_switch:
        return value
    many = action.nargs in ("*", "+") or isinstance(action.nargs, int)
    if many != isinstance(value, list) and (many or action.type in (None, int, float, str)):
        # A single word may stand for a list of one, as on the command line.
        value = " ".join(str(v) for v in value) if isinstance(value, list) else [value]
    words = value if many and isinstance(value, list) else [value]
    values = [parser.read_value(action, str(word)) for word in words]
    return values if many else values[0]
