"""Parse the command line; the flags come from the config sections.

All errors are reported at once.  User code adds flags by ``extra_args_provider(parser)``, which
receives the argparse parser.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Mapping, Sequence

from megatron.core.config.option import flag_of, options_of
from megatron.training.arguments.argument_parser import Parser
from megatron.training.arguments.config_file import read_config_file, set_defaults_from
from megatron.training.arguments.help import HelpAction
from megatron.training.arguments.options import GIVEN as GIVEN
from megatron.training.arguments.options import add_options, groups_of, help_line
from megatron.training.arguments.sections import ALL_CLASSES, flags_and_defaults
from megatron.training.config.mimo import MimoConfig
from megatron.training.process.user_code import modules_to_import, problems_of_imports

# Flags of examples/mimo/train.py, whose general names other programs have for flags of their own.
_OF_ONE_PROGRAM = {flag_of(f, opt) for f, opt in options_of(MimoConfig)}
_CONFIG = "--config"  # the second name of --yaml-cfg, which a program may use for a flag of its own
ExtraArgsProvider = Callable[[argparse.ArgumentParser], "argparse.ArgumentParser | None"]


def add_megatron_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add all flags, in Megatron-LM's groups; return ``parser``."""
    groups = groups_of(parser)
    for config_class in ALL_CLASSES:
        add_options(groups, config_class, help_line)
    # Later versions of Megatron-LM spell switches that turn something off both ways.
    spelled = parser._option_string_actions
    for flag, action in [*spelled.items()]:
        for prefix, other in (("--no-", "--disable-"), ("--disable-", "--no-")):
            if flag.startswith(prefix) and action.nargs == 0:
                spelled.setdefault(other + flag.removeprefix(prefix), action)
    return parser


def build_parser(extra_args_provider: ExtraArgsProvider | None = None) -> Parser:
    """Return a parser of all flags, in Megatron-LM's groups."""
    parser = Parser(
        description="Train large transformers. Switches are off unless given.",
        usage="%(prog)s [flags]",
    )
    parser.add_argument(
        *("-h", "--help", "--help-all"),
        action=HelpAction,
        default=argparse.SUPPRESS,
        metavar="[FLAG | TOPIC | all]",
        help="Print the flags of a first run, a flag, a topic, or all flags.",
    )
    add_megatron_arguments(parser)
    if extra_args_provider is not None:
        with parser.may_replace({*_OF_ONE_PROGRAM, _CONFIG}):
            extended = extra_args_provider(parser)
        if isinstance(extended, Parser):
            parser = extended
    return parser


_common_parser = functools.cache(build_parser)  # to build one takes most of the time to parse


# Attributes of a parsed namespace.  Warnings that `resolve` adds to RunConfig.warnings.
PARSE_WARNINGS = "parse_warnings"
# Dests whose values belong to the program, which has replaced the flag by one of its own: neither
# a derivation nor a checkpoint may change them.
OF_PROGRAM = "dests_of_program"


def parse_args(
    extra_args_provider: ExtraArgsProvider | None = None,
    ignore_unknown_args: bool = False,
    argv: Sequence[str] | None = None,
    args_defaults: Mapping[str, object] | None = None,
) -> argparse.Namespace:
    """Parse the command line, which overrides the file of --config (or --yaml-cfg).

    ``args_defaults`` (dest -> value) are a program's own defaults for flags whose value is None.
    Invalid flags end the program with status 2.  Raise ConfigError for a file that cannot be read.
    """
    words = sys.argv[1:] if argv is None else argv
    file = _config_file(words, extra_args_provider)
    content = read_config_file(*file) if file else {}
    # Import these modules first: they may register choices of other flags.
    in_file = content.get("import_module") or ()
    modules = [*([in_file] if isinstance(in_file, str) else in_file), *modules_to_import(words)]
    problems = problems_of_imports(map(str, modules))
    if extra_args_provider is None and not file:
        parser = _common_parser()
        parser.begin()
    else:  # which change flags and defaults
        parser = build_parser(extra_args_provider)
    parser.problems.extend(problems)
    if file:
        set_defaults_from(parser, content, f"{file[1]} {file[0]}")
    args, rest = parser.parse_known_args(words)
    vars(args).update({k: [*v] for k, v in vars(args).items() if isinstance(v, list)})
    if not ignore_unknown_args:
        parser.problems.extend(parser.unknown(rest))
    if parser.problems:
        parser.error("")
    if parser.replaced:
        vars(args)[OF_PROGRAM] = tuple(parser.replaced)
    vars(args)[GIVEN] = dict(parser.given)
    vars(args)[PARSE_WARNINGS] = [*parser.warnings, *apply_defaults(args, args_defaults or {})]
    return args


def _config_file(words: Sequence[str], provider: ExtraArgsProvider | None) -> list[str]:
    """Return the file of --config or --yaml-cfg, which is read before the other flags, and which
    of both flags names it; an empty list if none does.
    """
    flags = [word.partition("=")[0] for word in words]
    if not {_CONFIG, "--yaml-cfg"}.intersection(flags):
        return []
    is_ours = (
        provider is None
        or _CONFIG not in flags
        or build_parser(provider)._option_string_actions[_CONFIG].dest == "yaml_cfg"
    )
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    names = [_CONFIG, "--yaml-cfg"] if is_ours else ["--yaml-cfg"]
    finder.add_argument(*names, dest="yaml_cfg", default=None, nargs="?")
    path = finder.parse_known_args(words)[0].yaml_cfg
    return [] if path is None else [path, next(name for name in names if name in flags)]


def apply_defaults(args: argparse.Namespace, defaults: Mapping[str, object]) -> list[str]:
    """Set each value that is None to the program's default (``args_defaults`` of `pretrain`).

    A flag with a default of its own keeps that default.  Return a warning for each such flag, with
    the flag and value that select the program's default.
    """
    warnings = []
    given = vars(args)
    for dest, value in defaults.items():
        flag, own = flags_and_defaults().get(dest, (dest, None))
        if given.get(dest) is None:
            given[dest] = value
        elif given[dest] == own != value:
            choice = flag if isinstance(value, bool) else f"{flag} {value}"
            warnings.append(f"{flag} is {own}; this program's default {value} needs {choice}")
    return warnings
