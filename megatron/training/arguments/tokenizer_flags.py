"""The tokenizer flags alone, for programs that prepare data.  Torch-free."""

from __future__ import annotations

import argparse
from collections import defaultdict

from megatron.training.arguments.options import add_options
from megatron.training.config.tokenizer import TokenizerConfig


def _add_tokenizer_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add --tokenizer-type and its kin to ``parser`` (the reference's name for this)."""
    group = parser.add_argument_group(title="tokenizer")
    everything: dict[str, argparse._ArgumentGroup] = defaultdict(lambda: group)
    add_options(everything, TokenizerConfig)
    return parser
