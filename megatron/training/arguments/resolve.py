"""Turn a parsed namespace into a checked RunConfig; report all problems at once.

The result depends on namespace and world size only, not on globals, files or the environment.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from megatron.core.config import flag_messages
from megatron.core.config.errors import ConfigError
from megatron.core.config.option import dest_of, flag_of, options_of
from megatron.core.config.rule import problems_of
from megatron.training.arguments.derive import DERIVATIONS, rewritten
from megatron.training.arguments.options import namespace_default, read_config
from megatron.training.arguments.parser import GIVEN, OF_PROGRAM, PARSE_WARNINGS
from megatron.training.arguments.rules import (
    files,
    images,
    model,
    moe,
    parallel,
    post_training,
    training,
)
from megatron.training.arguments.rules.requirements import REQUIREMENTS
from megatron.training.arguments.rules.rule import Settings, warnings_of
from megatron.training.arguments.sections import ALL_CLASSES, SECTIONS, flags_and_defaults
from megatron.training.arguments.value_rules import has_excessive_number, out_of_range
from megatron.training.config.run import RunConfig

RULES = (
    *files.RULES,
    *parallel.RULES,
    *moe.RULES,
    *model.RULES,
    *images.RULES,
    *training.RULES,
    *post_training.RULES,
    *(rule for section in SECTIONS.values() for rule in getattr(section, "RULES", ())),
)

# Values of the launcher, in namespaces of scripts written for Megatron-LM.
_LAUNCH = frozenset({"rank", "world_size"})

# Fields of sections that a derivation sets, not a flag.
DERIVED_FIELDS = frozenset(
    (
        "gated_linear_unit activation_func bias_activation_fusion params_dtype pipeline_dtype "
        "virtual_pipeline_model_parallel_size fp16 bf16 init_seed"
    ).split()
)


def states(args: Namespace, *, trains: bool = True) -> tuple[list[str], list[str]]:
    """Return error messages for refused flags, and warnings for ignored flags, that are given.

    A script that may never train (``trains`` False) reads the flags of generation.
    """
    refused, ignored = [], []
    given = vars(args)
    for config_class in ALL_CLASSES:
        for f, opt in options_of(config_class):
            value = given[dest_of(f, opt)]
            if value == namespace_default(f, opt) or value in opt.harmless:
                continue
            flag = flag_of(f, opt)
            if opt.both_ways and value is False:
                flag = f"--no-{flag.removeprefix('--')}"
            shown = flag if isinstance(value, bool) else f"{flag} {value}"
            values = value if isinstance(value, list) else [value]
            reasons = (opt.refused_values[v] for v in values if v in opt.refused_values)
            reason = opt.refused or next(reasons, None)
            if reason is not None:
                refused.append(f"{shown}: {reason}")
            is_read = not trains and opt.ignored == flag_messages.GENERATION
            if opt.ignored is not None and not is_read:
                ignored.append(f"{shown} is without effect: {opt.ignored}")
    return refused, ignored


def resolve(
    args: Namespace,
    world_size: int,
    *,
    extra: Mapping[str, object] | None = None,
    problems: Iterable[str] = (),
    trains: bool = True,
) -> RunConfig:
    """Return the RunConfig that ``args`` request on ``world_size`` ranks.

    ``extra`` holds the values of flags that a user script added; by default those of ``args`` that
    no section declares.  Raise ConfigError with ``problems``, which the caller has found, and all
    others.  ``RunConfig.warnings`` lists overridden and ignored flags.  ``trains``: see RunConfig.
    """
    given = dict(vars(args))
    given.pop(GIVEN, None)
    replaced = given.pop(OF_PROGRAM, ())
    own = {dest: given[dest] for dest in replaced if dest in given}
    given.update({dest: flags_and_defaults()[dest][1] for dest in replaced})
    refused, warnings = states(Namespace(**given), trains=trains)
    problems = [*problems, *refused]
    warnings[:0] = given.pop(PARSE_WARNINGS, ())
    if has_excessive_number(given):
        ConfigError.raise_for([*problems, *out_of_range(given)])
    ns = Namespace(**given)
    ns.world_size = world_size
    ns.trains = trains
    for derive in DERIVATIONS:
        warnings.extend(derive(ns) or ())
    given |= {dest: vars(ns)[dest] for dest in rewritten(given)}
    known = flags_and_defaults().keys() | _LAUNCH
    if extra is None:
        extra = {dest: value for dest, value in given.items() if dest not in known} | own
    config = assemble(
        ns,
        trains=trains,
        extra=dict(extra),
        asked={dest: value for dest, value in given.items() if dest != "yaml_cfg"},
    )
    ConfigError.raise_for([*problems, *problems_of(RULES, Settings(config))])
    return replace(config, warnings=(*warnings, *warnings_of(REQUIREMENTS, config)))


def require_training(config: RunConfig) -> RunConfig:
    """Return the configuration of a script that is about to train.

    Raises ConfigError for what training needs and `resolve` did not require.
    """
    if config.trains:
        return config
    config = replace(config, trains=True)
    ConfigError.raise_for(problems_of(RULES, Settings(config)))
    return config


def assemble(ns: Namespace, **rest: Any) -> RunConfig:
    """Build a RunConfig from a derived namespace."""
    sections = {name: read_config(cls, ns) for name, cls in SECTIONS.items()}
    return RunConfig(**sections, world_size=ns.world_size, **rest)
