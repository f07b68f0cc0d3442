"""The reference's flat namespace, for scripts that were written for it.

`legacy_namespace` is what get_args() returns: a read-only copy of the configuration, with the
derived values and counters that scripts look for.  Nothing inside ``megatron/`` reads it.
"""

from __future__ import annotations

import argparse
import os
from argparse import Namespace
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron.core.config.errors import ConfigError
from megatron.core.config.option import dest_of, options_of
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.arguments import parser as parsing
from megatron.training.arguments.options import read_config
from megatron.training.arguments.resolve import DERIVED_FIELDS, resolve
from megatron.training.arguments.sections import SECTIONS
from megatron.training.config.run import RunConfig

if TYPE_CHECKING:
    from megatron.training.runtime import Runtime


class ReadOnlyNamespace(Namespace):
    """A namespace that says how to change a value instead of changing it."""

    def __setattr__(self, name: str, value: Any) -> None:
        raise ConfigError(
            f"get_args() returns a copy and {name} = {value!r} would change nothing: set "
            f"--{name.replace('_', '-')} or give pretrain() args_defaults"
        )

    def __delattr__(self, name: str) -> None:
        raise ConfigError(f"get_args() returns a copy: deleting {name} would change nothing")


def _read_only(values: Mapping[str, Any]) -> ReadOnlyNamespace:
    namespace = ReadOnlyNamespace()
    vars(namespace).update(values)
    return namespace


def flat_values(run: RunConfig) -> dict[str, Any]:
    """dest -> value of all flags after resolving, and the values derived from them."""
    values = dict(run.asked)
    for name, cls in SECTIONS.items():
        section = vars(vars(run)[name])
        for f, opt in options_of(cls):
            value = section[f.name]
            value = not value if opt.inverted else value
            values[dest_of(f, opt)] = list(value) if isinstance(value, tuple) else value
        for name_of_field in DERIVED_FIELDS & section.keys():
            values[name_of_field] = section[name_of_field]
    m = run.model
    values.update(run.extra)
    values.update(
        world_size=run.world_size,
        data_parallel_size=run.data_parallel_size,
        transformer_pipeline_model_parallel_size=m.pipeline_model_parallel_size,
        use_dist_ckpt=run.checkpoint.ckpt_format != "torch",
        variable_seq_lengths=False,
    )
    return values


def legacy_namespace(runtime: Runtime) -> ReadOnlyNamespace:
    """Configuration and counters of a running program, in the reference's flat form."""
    values, state = flat_values(runtime.config), runtime.state
    if runtime.padded_vocab_size:
        values["padded_vocab_size"] = runtime.padded_vocab_size
    values.update(
        rank=_environment("RANK", 0),
        local_rank=_environment("LOCAL_RANK", runtime.config.distributed.local_rank),
        train_iters=runtime.train_iters or runtime.config.training.train_iters,
        iteration=state.iteration,
        curr_iteration=state.iteration,
        consumed_train_samples=state.consumed_train_samples,
        skipped_train_samples=state.skipped_train_samples,
        consumed_valid_samples=state.consumed_valid_samples,
        num_floating_point_operations_so_far=state.num_floating_point_operations_so_far,
    )
    return _read_only(values)


def _environment(name: str, default: int) -> int:
    return int(os.environ.get(name, default))


def parse_args(
    extra_args_provider: parsing.ExtraArgsProvider | None = None,
    ignore_unknown_args: bool = False,
) -> Namespace:
    """The command line as the reference's scripts expect it: with rank and world_size."""
    args = parsing.parse_args(extra_args_provider, ignore_unknown_args)
    vars(args).update(rank=_environment("RANK", 0), world_size=_environment("WORLD_SIZE", 1))
    return args


def validate_args(args: Namespace, defaults: Mapping[str, Any] | None = None) -> Namespace:
    """Check ``args`` and fill in every derived value, in place.  Raises ConfigError."""
    parsing.apply_defaults(args, defaults or {})
    world_size = vars(args).get("world_size") or _environment("WORLD_SIZE", 1)
    vars(args).update(flat_values(resolve(args, world_size)))
    vars(args).setdefault("rank", _environment("RANK", 0))
    vars(args).update(
        consumed_train_samples=0, skipped_train_samples=0, consumed_valid_samples=0, iteration=0
    )
    return args


def core_transformer_config_from_args(
    args: argparse.Namespace, config_class: type[TransformerConfig] | None = None
) -> TransformerConfig:
    """The model section of ``args``, which come from get_args() or validate_args()."""
    if "activation_func" not in vars(args):
        raise ConfigError(
            "core_transformer_config_from_args() needs validated arguments: call validate_args() "
            "first or take get_args()"
        )
    config: TransformerConfig = read_config(config_class or TransformerConfig, args)
    return config
