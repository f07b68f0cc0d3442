"""Resolve parsed arguments, also those that validate_args() has filled in for a script."""

from __future__ import annotations

from argparse import Namespace

from megatron.training.arguments.flat_values import COUNTERS, flat_values
from megatron.training.arguments.resolve import resolve
from megatron.training.config.run import RunConfig

# Attribute of a namespace in which validate_args() stores its RunConfig.
VALIDATED = "validated_run"


def resolve_args(args: Namespace, world_size: int, *, trains: bool = True) -> RunConfig:
    """Return the resolved configuration of ``args``.  Raises ConfigError.  See `resolve`.

    Also accepts validated arguments that a script has changed since: unchanged derived values are
    then derived again.
    """
    before = vars(args).get(VALIDATED)
    if before is None:
        return resolve(args, world_size, trains=trains)
    filled_in = {**flat_values(before), **dict.fromkeys(COUNTERS, 0), VALIDATED: before}
    changed = {
        dest: value
        for dest, value in vars(args).items()
        if dest not in filled_in or filled_in[dest] != value
    }
    given = {"yaml_cfg": None, **before.asked, **before.extra, **changed}
    return resolve(Namespace(**given), world_size, trains=trains)
