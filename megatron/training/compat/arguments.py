"""Megatron-LM's functions on arguments, for scripts that parse and validate by themselves."""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Mapping

from megatron.core.config.errors import ConfigError
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.arguments import parser as parsing
from megatron.training.arguments.flat_values import COUNTERS, VALIDATED, flat_values, resolve_args
from megatron.training.arguments.options import read_config
from megatron.training.arguments.resolve import assemble
from megatron.training.estimates.theoretical_memory import print_memory
from megatron.training.process.rank_print import rank, world_size


def parse_args(
    extra_args_provider: parsing.ExtraArgsProvider | None = None, ignore_unknown_args: bool = False
) -> Namespace:
    """Parse the command line; the result also has rank and world_size, as in Megatron-LM."""
    args = parsing.parse_args(extra_args_provider, ignore_unknown_args)
    vars(args).update(rank=rank(), world_size=world_size())
    return args


def validate_args(args: Namespace, defaults: Mapping[str, object] | None = None) -> Namespace:
    """Check ``args`` and fill in every derived value, in place.  Raises ConfigError."""
    parsing.apply_defaults(args, defaults or {})
    ranks = vars(args).get("world_size") or world_size()
    run = resolve_args(args, ranks, trains=False)  # initialize_megatron() says if it is to train
    vars(args).update(flat_values(run), **dict.fromkeys(COUNTERS, 0))
    vars(args)[VALIDATED] = run
    vars(args).setdefault("rank", rank())
    return args


def core_transformer_config_from_args(
    args: argparse.Namespace, config_class: type[TransformerConfig] | None = None
) -> TransformerConfig:
    """Return the model configuration of ``args`` from get_args() or validate_args().

    Raises ConfigError if ``args`` are not validated.
    """
    if "activation_func" not in vars(args):
        raise ConfigError(
            "core_transformer_config_from_args() needs validated arguments: call validate_args() "
            "first or take get_args()"
        )
    config: TransformerConfig = read_config(config_class or TransformerConfig, args)
    return config


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
