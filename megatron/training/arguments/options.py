"""Convert ``option()`` metadata to argparse arguments, and a namespace to configs.  No torch.

`add_options` adds the flags of a config class to a parser; `read_config` builds the class from a
parsed namespace.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import functools
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron.core.config.option import Option, cli_default, dest_of, flag_of, options_of

# Attribute of a parsed namespace: dests set by the user, not by the program, and whether on the
# command line.
GIVEN = "dests_given"
# Headings of --help in Megatron-LM's order, then our own.
GROUPS = """
network size
regularization
training
initialization
learning rate
checkpointing
mixed precision
distributed
validation
data and dataloader
tokenizer
autoresume
biencoder
vision
MIMO
ModelOpt
moe
mla
heterogeneous architecture
logging
straggler
workload inspector
inference
Transformer-Engine
retro
experimental
one logger
In-process restart
ft_package
config logger
rerun engine
msc
kitchen
sft
preference
adapters
distillation
rl
Logits Distillation
device and checks
extensions
""".strip().splitlines()


_CONTAINERS = (typing.Union, types.UnionType, tuple, Sequence)
_WIDEST = 60
_METAVAR: dict[object, str] = {int: "N", float: "X", str: "TEXT"}


def _metavar(kind: object, opt: Option) -> str:
    if opt.choices is None:
        return _METAVAR.get(kind, "VALUE")
    names = [c.name if isinstance(c, enum.Enum) else str(c) for c in opt.choices if c is not None]
    text = "{" + ",".join(names) + "}"
    return text if len(text) <= _WIDEST else "NAME"  # the help text has them


def groups_of(parser: argparse.ArgumentParser) -> dict[str, argparse._ArgumentGroup]:
    """Add all headings to ``parser`` as empty argument groups, in order; return them by name."""
    return {heading: parser.add_argument_group(heading) for heading in GROUPS}


def value_type(annotation: object) -> object:
    """Return the value type of an annotation: ``int`` for ``int | None``, ``tuple[int, ...]``."""
    if typing.get_origin(annotation) not in _CONTAINERS:
        return annotation
    inner = {value_type(a) for a in typing.get_args(annotation) if a not in (type(None), Ellipsis)}
    if len(inner) != 1:
        raise TypeError(f"a flag needs one value type, got {annotation}; give option(parse=...)")
    return inner.pop()


def namespace_default(f: dataclasses.Field[Any], opt: Option) -> object:
    """Return the namespace's value if the flag is absent; a tuple becomes a list."""
    default = cli_default(f, opt)
    if opt.inverted:
        return not default
    return list(default) if isinstance(default, tuple) else default


def add_options(
    groups: Mapping[str, argparse._ArgumentGroup],
    config_class: type,
    describe: Callable[[dataclasses.Field[Any], Option], str] | None = None,
) -> None:
    """Add all flags of ``config_class`` to their groups.

    ``describe`` composes the help text; by default it is the option's own.
    """
    for f, opt, spelling in _spellings(config_class, describe):
        default = namespace_default(f, opt)  # a list of this parser
        groups[opt.group].add_argument(flag_of(f, opt), *opt.aliases, default=default, **spelling)


@functools.cache  # takes most of the time to build a parser
def _spellings(
    config_class: type, describe: Callable[[dataclasses.Field[Any], Option], str] | None
) -> Sequence[tuple[dataclasses.Field[Any], Option, Mapping[str, Any]]]:
    """Return each flag with the arguments of `add_argument` except names and default."""
    hints = typing.get_type_hints(config_class)
    found = []
    for f, opt in options_of(config_class):
        spelling: dict[str, Any] = {
            "dest": dest_of(f, opt),
            # argparse applies % formatting to help texts.
            "help": (describe(f, opt) if describe else opt.help).replace("%", "%%"),
        }
        if opt.both_ways:
            spelling["action"] = argparse.BooleanOptionalAction
        elif is_switch(hints[f.name], opt):
            is_on = namespace_default(f, opt) is True
            spelling["action"] = "store_false" if is_on else "store_true"
        else:
            spelling["action"] = "extend" if opt.repeatable else "store"
            spelling["type"] = opt.parse or value_type(hints[f.name])
            spelling["nargs"] = opt.nargs
            spelling["choices"] = opt.choices
            spelling["metavar"] = _metavar(spelling["type"], opt)
            if spelling["metavar"] == "NAME":
                spelling["help"] += f" One of {', '.join(map(str, opt.choices or ()))}."
        found.append((f, opt, spelling))
    return found


def is_switch(annotation: object, opt: Option) -> bool:
    """Return whether the flag takes no value: its field is ``bool`` or ``bool | None``."""
    is_bool = annotation is bool or set(typing.get_args(annotation)) == {bool, type(None)}
    return is_bool and opt.parse is None


def read_config(config_class: type, args: argparse.Namespace) -> Any:
    """Build ``config_class`` from ``args``; a field whose value is None keeps its default.

    A field without a flag is read by its name if ``args`` has it (``params_dtype``, which is
    derived from --bf16).
    """
    values = {f.name: vars(args).get(f.name) for f in dataclasses.fields(config_class)}
    for f, opt in options_of(config_class):
        value = vars(args)[dest_of(f, opt)]
        values[f.name] = not value if opt.inverted else value
    build = getattr(config_class, "unchecked", config_class)
    return build(
        **{
            name: tuple(value) if isinstance(value, list) else value
            for name, value in values.items()
            if value is not None
        }
    )


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
