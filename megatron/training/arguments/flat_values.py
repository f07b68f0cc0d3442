"""All settings of a run as one flat mapping by dest, and runs resolved from such values."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from megatron.core.config.option import dest_of, options_of
from megatron.training.arguments.resolve import DERIVED_FIELDS, resolve
from megatron.training.arguments.sections import SECTIONS
from megatron.training.config.run import RunConfig

# Progress of a run; all other values of a flat namespace are settings.
COUNTERS = (
    "iteration",
    "consumed_train_samples",
    "skipped_train_samples",
    "consumed_valid_samples",
    "num_floating_point_operations_so_far",
)
# Of one element, Megatron-LM's value is this element, with which scripts compare it.
_SCALAR_IF_ONE = ("moe_router_load_balancing_type", "moe_aux_loss_coeff")


def flat_values(config: RunConfig) -> dict[str, Any]:
    """Return dest -> resolved value of all flags, and the values derived from them."""
    values = dict(config.asked)
    for name, cls in SECTIONS.items():
        section = vars(vars(config)[name])
        for f, opt in options_of(cls):
            value = section[f.name]
            value = not value if opt.inverted else value
            dest = dest_of(f, opt)
            values[dest] = list(value) if isinstance(value, tuple) else value
            if dest in _SCALAR_IF_ONE and isinstance(value, tuple) and len(value) == 1:
                (values[dest],) = values[dest]
        for name_of_field in DERIVED_FIELDS & section.keys():
            values[name_of_field] = section[name_of_field]
    m = config.model
    values.update(config.extra)
    values.setdefault("yaml_cfg", None)  # the other values include those of the file
    values.update(
        world_size=config.world_size,
        data_parallel_size=config.data_parallel_size,
        transformer_pipeline_model_parallel_size=m.pipeline_model_parallel_size,
        use_dist_ckpt=config.checkpoint.ckpt_format != "torch",
        variable_seq_lengths=False,
    )
    return values


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
