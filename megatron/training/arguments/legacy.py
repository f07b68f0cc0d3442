"""The reference's flat namespace, for scripts that were written for it.

`legacy_namespace` is what get_args() returns: the configuration, read-only, with the derived
values and counters that scripts look for.  Nothing inside ``megatron/`` reads it.
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
from megatron.core.utils import PaddedSize
from megatron.training.arguments import parser as parsing
from megatron.training.arguments.options import read_config
from megatron.training.arguments.resolve import DERIVED_FIELDS, resolve
from megatron.training.arguments.sections import SECTIONS, flags_and_defaults
from megatron.training.config.run import RunConfig
from megatron.training.rank_print import rank, world_size

if TYPE_CHECKING:
    from megatron.training.runtime import Runtime


# What a run has done so far; all else in the namespace is what it was asked to do.
_COUNTERS = (
    "iteration",
    "consumed_train_samples",
    "skipped_train_samples",
    "consumed_valid_samples",
    "num_floating_point_operations_so_far",
)


# What validate_args() leaves in a namespace: the RunConfig that it stands for.
_VALIDATED = "validated_run"


class ReadOnlyNamespace(Namespace):
    """A namespace that says how to change a value instead of changing it.

    Its copies are plain namespaces, which may be written.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if name in flags_and_defaults():
            cure = f"set {flags_and_defaults()[name][0]} or give pretrain() args_defaults"
        elif name in (*_COUNTERS, "curr_iteration"):
            cure = "steps are counted by pretrain(), train_step() and load_checkpoint()"
        else:
            cure = "write to copy.copy(get_args()), or keep the value in a variable of your own"
        raise ConfigError(f"get_args() is read-only, {name} = {value!r} changes nothing: {cure}")

    def __delattr__(self, name: str) -> None:
        raise ConfigError(f"get_args() is read-only: deleting {name} would change nothing")

    def __reduce__(self) -> tuple[type[Namespace], tuple[()], dict[str, Any]]:
        return Namespace, (), dict(vars(self))


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
    values.setdefault("yaml_cfg", None)  # what the file said stands in the other values
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
    namespace = ReadOnlyNamespace()
    values = flat_values(runtime.config)
    vars(namespace).update(values, rank=rank(), local_rank=_local_rank(runtime))
    refresh(namespace, runtime)
    return namespace


def refresh(namespace: ReadOnlyNamespace, runtime: Runtime) -> None:
    """Bring up to date what changes in the life of ``runtime``.  Cheap: once per get_args()."""
    values, state = vars(namespace), vars(runtime.state)
    for name in _COUNTERS:
        values[name] = state[name]
    values["curr_iteration"] = state["iteration"]
    if runtime.train_iters:
        values["train_iters"] = runtime.train_iters
    if runtime.padded_vocab_size and not isinstance(values["padded_vocab_size"], PaddedSize):
        values["padded_vocab_size"] = _padded_vocab_size(runtime)


def _padded_vocab_size(runtime: Runtime) -> int:
    """The size for a model; it remembers the true one if padding stays out of the loss."""
    if runtime.config.language_model.pad_vocab_in_loss:
        return runtime.padded_vocab_size
    return PaddedSize(runtime.padded_vocab_size, runtime.tokenizer.vocab_size)


def _local_rank(runtime: Runtime) -> int:
    return int(os.environ.get("LOCAL_RANK", runtime.config.distributed.local_rank))


def parse_args(
    extra_args_provider: parsing.ExtraArgsProvider | None = None, ignore_unknown_args: bool = False
) -> Namespace:
    """The command line as the reference's scripts expect it: with rank and world_size."""
    args = parsing.parse_args(extra_args_provider, ignore_unknown_args)
    vars(args).update(rank=rank(), world_size=world_size())
    return args


def resolve_args(args: Namespace, world_size: int) -> RunConfig:
    """`resolve`, also of arguments that were validated before and perhaps changed since."""
    before = vars(args).get(_VALIDATED)
    if before is None:
        return resolve(args, world_size)
    filled_in = {**flat_values(before), **dict.fromkeys(_COUNTERS, 0), _VALIDATED: before}
    changed = {
        dest: value
        for dest, value in vars(args).items()
        if dest not in filled_in or filled_in[dest] != value
    }
    return resolve(Namespace(**{"yaml_cfg": None, **before.asked, **changed}), world_size)


def validate_args(args: Namespace, defaults: Mapping[str, Any] | None = None) -> Namespace:
    """Check ``args`` and fill in every derived value, in place.  Raises ConfigError."""
    parsing.apply_defaults(args, defaults or {})
    run = resolve_args(args, vars(args).get("world_size") or world_size())
    vars(args).update(flat_values(run), **dict.fromkeys(_COUNTERS, 0))
    vars(args)[_VALIDATED] = run
    vars(args).setdefault("rank", rank())
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
