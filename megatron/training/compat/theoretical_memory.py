"""Megatron-LM's function that prints the theoretical memory of a script's arguments."""

from __future__ import annotations

from argparse import Namespace

from megatron.core.config.errors import ConfigError
from megatron.training.arguments.resolve import assemble
from megatron.training.estimates.theoretical_memory import print_memory


def report_theoretical_memory(
    args: Namespace, num_microbatches: int | None = None, verbose: bool = False
) -> None:
    """Print the estimated memory for ``args`` from get_args() or validate_args().

    Raises ConfigError if the padded vocabulary size is not known.
    """
    if not args.padded_vocab_size:
        raise ConfigError(
            "report_theoretical_memory() needs the padded vocabulary size: give "
            "--padded-vocab-size, or call initialize_megatron() first"
        )
    print_memory(assemble(args), args.padded_vocab_size, num_microbatches or 1, verbose)
