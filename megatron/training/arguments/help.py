"""--help: the flags of a first run; --help TOPIC, --help FLAG and --help all tell the rest."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from textwrap import fill
from typing import Any

from megatron.training.arguments.argument_parser import suggestion
from megatron.training.arguments.options import GROUPS

FIRST_RUN = """
--num-layers --hidden-size --num-attention-heads --seq-length --max-position-embeddings
--data-path --mock-data --tokenizer-type --tokenizer-model --micro-batch-size --global-batch-size
--train-iters --lr --bf16 --eval-iters --log-interval --save --load --save-interval
--tensor-model-parallel-size --pipeline-model-parallel-size --check-only --config
""".split()
_EXAMPLE = """
example, a minute on a laptop:
  python pretrain_gpt.py --mock-data --tokenizer-type NullTokenizer \\
      --vocab-size 1000 --num-layers 4 --hidden-size 128 --num-attention-heads 4 \\
      --seq-length 128 --max-position-embeddings 128 --micro-batch-size 4 --lr 1e-3 --train-iters 50
"""
_MORE = """
--help FLAG explains a flag, --help WORD all flags that have to do with a word, --help all every
flag, and --help TOPIC the flags of one of these topics:
  {topics}
"""
_MOST_EXPLAINED = 40  # flags that a search finds


class HelpAction(argparse.Action):
    """Prints what the word behind --help asks for, and ends the program."""

    def __init__(self, option_strings: Sequence[str], **settings: Any) -> None:
        # It takes the rest of the command line: a flag is no value of another one.
        super().__init__(option_strings, nargs=argparse.REMAINDER, **settings)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Print and exit, with status 2 if no flag has to do with the word."""
        word = "all" if option_string == "--help-all" else " ".join(values)
        text = help_of(parser, word)
        if text is None:
            known = [*parser._option_string_actions, *GROUPS]
            hint = suggestion(word, known)
            parser.exit(2, f"{parser.prog} --help {word}: no flag has to do with it{hint}\n")
        print(text, end="")
        parser.exit()


def help_of(parser: argparse.ArgumentParser, word: str) -> str | None:
    """Return what ``--help word`` prints; None if no flag has to do with ``word``."""
    if word == "all":
        return parser.format_help()
    if not word:
        return _first_page(parser)
    name = _plain(word)
    everything = [a for group in parser._action_groups for a in group._group_actions]
    of_topic = [
        a for g in parser._action_groups if _plain(g.title or "") == name for a in g._group_actions
    ]
    found = [a for a in everything if name in map(_plain, a.option_strings)]
    found = found or of_topic
    found = found or [a for a in everything if name in _plain(" ".join(a.option_strings))]
    found = found or [a for a in everything if name in _plain(a.help or "")]
    if len(found) <= _MOST_EXPLAINED or found == of_topic:
        sections = [
            (group.title or "", [a for a in group._group_actions if a in found])
            for group in parser._action_groups
        ]
        return _sections(parser, sections) if found else None
    names = "".join(f"  {action.option_strings[0]}\n" for action in found)
    return f"{len(found)} flags have to do with {word}; --help FLAG explains one:\n{names}"


def _first_page(parser: argparse.ArgumentParser) -> str:
    of_program = [
        (group.title or "", group._group_actions)
        for group in parser._action_groups[2:]  # the first two are argparse's own
        if group.title not in GROUPS
    ]
    of_tool: Sequence[str] = getattr(parser, "flags_of_tool", ())
    flags = [parser._option_string_actions[flag] for flag in of_tool or FIRST_RUN]
    title = "flags that it reads" if of_tool else "flags of a first run"
    topics = [g.title for g in parser._action_groups[2:] if g.title and g._group_actions]
    return "".join(
        [
            parser.format_usage(),
            "" if of_tool else _EXAMPLE,
            _sections(parser, [*of_program, (title, flags)]),
            _MORE.format(topics=fill(", ".join(topics), 78, subsequent_indent="  ")),
        ]
    )


def _sections(
    parser: argparse.ArgumentParser, sections: Sequence[tuple[str, Sequence[argparse.Action]]]
) -> str:
    formatter = parser._get_formatter()
    for title, actions in sections:
        formatter.start_section(title)
        formatter.add_arguments(actions)
        formatter.end_section()
    return "\n" + formatter.format_help()


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]+", "-", name).strip("-").lower()
