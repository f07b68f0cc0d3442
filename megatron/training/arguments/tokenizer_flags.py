"""The tokenizer flags alone, for data preparation programs.  No torch."""

from __future__ import annotations

import argparse
from collections import defaultdict

from megatron.training.arguments.options import add_options
from megatron.training.config.tokenizer import TokenizerConfig


def _add_tokenizer_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the tokenizer flags to ``parser``; Megatron-LM's name for this function."""
    group = parser.add_argument_group(title="tokenizer")
    everything: dict[str, argparse._ArgumentGroup] = defaultdict(lambda: group)
    add_options(everything, TokenizerConfig)
    return parser
