"""Sort parameters into groups that share a learning rate and a weight decay."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, TypedDict

from torch import nn

from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer_param_scheduler import ScheduledGroup
from megatron.core.params.param_info import info_of

_HEADS = (
    "output_layer",
    "lm_head",
    "binary_head",
    "pooler",
    "classifier",
)  # names of a model's attributes
_EMBEDDING_OR_OUTPUT = "is_embedding_or_output_parameter"  # Megatron Core's attribute
ParamCondition = Callable[[str, nn.Parameter], bool]


class ParamGroupOverride(TypedDict, total=False):
    """Hyperparameters of a group that replace the configuration's."""

    max_lr: float
    min_lr: float
    wd_mult: float


@dataclass(frozen=True)
class ParamPredicate:
    """A condition on a parameter; predicates with the same name are equal."""

    name: str
    fn: Callable[[nn.Parameter], bool] = field(compare=False)

    def __call__(self, param: nn.Parameter) -> bool:
        return self.fn(param)


@dataclass(frozen=True)
class ParamKey:
    """Selects parameters: by a pattern of their name, a true attribute, or a predicate.

    ``name`` may have the wildcards of `fnmatch`.  A parameter is selected if anything matches.
    """

    name: str | tuple[str, ...] = ()
    attr: str | tuple[str, ...] = ()
    predicate: ParamPredicate | tuple[ParamPredicate, ...] = ()

    def matches(self, param: nn.Parameter, param_name: str) -> bool:
        """Return whether the key selects the parameter."""
        names = (self.name,) if isinstance(self.name, str) else self.name
        attributes = (self.attr,) if isinstance(self.attr, str) else self.attr
        predicates = self.predicate if isinstance(self.predicate, tuple) else (self.predicate,)
        return (
            any(fnmatchcase(param_name, pattern) for pattern in names)
            or any(getattr(param, name, False) for name in attributes)
            or (info_of(param).is_embedding_or_output and _EMBEDDING_OR_OUTPUT in attributes)
            or any(predicate(param) for predicate in predicates)
        )


class ParamGroup(ScheduledGroup, total=False):
    """Parameters that share hyperparameters, with the keys of torch.optim where it has them."""

    params: list[nn.Parameter]
    is_expert_parallel: bool
    is_matrix: bool  # whether Muon or SOAP updates them; present only under these
    betas: tuple[float, float]
    eps: float
    momentum: float


def no_weight_decay_on_embeddings(name: str, param: nn.Parameter) -> bool:
    """Return whether a parameter is a bias, a vector or an embedding.

    For models whose embeddings have a standard deviation of their own at initialization.
    """
    return name.endswith(".bias") or param.dim() == 1 or "embedding" in name


def is_matrix(name: str, param: nn.Parameter) -> bool:
    """Return whether Muon or SOAP updates a parameter: a matrix, but no embedding or output layer.

    The weight of a router is such a matrix; position embeddings and relative biases are not.
    """
    shape = info_of(param).global_shape
    return len(shape) == 2 and min(shape) > 1 and is_no_table(name, param)


def is_no_table(name: str, param: nn.Parameter) -> bool:
    """Return whether a parameter is neither an embedding, an output layer nor relative biases."""
    return (
        not info_of(param).is_embedding_or_output
        and "embedding" not in name
        and "relative_attention_bias" not in name
    )


def mup_factors(
    config: OptimizerConfig, name: str, param: nn.Parameter, width: float
) -> tuple[float, float]:
    """Return the factors of learning rate and weight decay under muP (arXiv 2203.03466, table 8).

    ``width``: that of the model divided by the base model's.  Matrices of layers have a learning
    rate of 1 / width; with SGD, all other parameters have one of width.  Orthogonal updates
    (Muon) need none.  The product of learning rate and weight decay does not change.
    """
    is_in_layer = len(info_of(param).global_shape) == 2 and is_no_table(name, param)
    if config.optimizer == "sgd":
        factor = 1.0 if is_in_layer else width
    elif is_in_layer and not ("muon" in config.optimizer and is_matrix(name, param)):
        factor = 1.0 / width
    else:
        factor = 1.0
    return factor, 1.0 / factor


def trainable_parameters(model_chunks: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield (name, parameter) of this rank in model order; names do not depend on the layout."""
    for chunk in model_chunks:
        for local_name, param in chunk.named_parameters():
            if param.requires_grad:
                yield info_of(param).name or without_wrappers(local_name), param


def without_wrappers(name: str) -> str:
    """Strip the "module." prefixes that wrappers (data parallelism, half precision) add."""
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def is_of_head(name: str, param: nn.Parameter) -> bool:
    """Return whether a parameter belongs to the output layer, a classifier or BERT's heads."""
    return without_wrappers(name).split(".")[0] in _HEADS


def get_standard_config_overrides(config: OptimizerConfig) -> dict[ParamKey, ParamGroupOverride]:
    """Return the default overrides: no weight decay on vectors, and the decoupled learning rate.

    --apply-wd-to-qk-layernorm excepts the norms of queries and keys.
    """
    is_vector = ParamPredicate("is_vector", lambda param: param.dim() == 1)
    found: dict[ParamKey, ParamGroupOverride] = {
        ParamKey(name="*.bias", predicate=is_vector): {"wd_mult": 0.0}
    }
    if config.apply_wd_to_qk_layernorm:
        norms = ("*.q_layernorm.weight", "*.k_layernorm.weight")
        found[ParamKey(name=norms)] = {"wd_mult": 1.0}
    if config.decoupled_lr is not None:
        decoupled: ParamGroupOverride = {"max_lr": config.decoupled_lr}
        if config.decoupled_min_lr is not None:
            decoupled["min_lr"] = config.decoupled_min_lr
        found[ParamKey(attr=_EMBEDDING_OR_OUTPUT)] = decoupled
    return found


def make_param_groups(
    model_chunks: Sequence[nn.Module],
    config: OptimizerConfig,
    *,
    no_weight_decay_cond: ParamCondition | None = None,
    scale_lr_cond: ParamCondition | None = None,
    lr_mult: float = 1.0,
    overrides: Mapping[ParamKey, ParamGroupOverride] | None = None,
) -> list[ParamGroup]:
    """Sort the trainable parameters of this rank into groups with equal hyperparameters.

    ``wd_mult`` and ``lr_mult`` of a group are the factors by which the scheduler multiplies weight
    decay and learning rate.  The argument ``lr_mult`` applies to parameters that ``scale_lr_cond``
    selects.  ``no_weight_decay_cond`` replaces the condition of `get_standard_config_overrides`,
    and ``overrides`` replace both; of several that select a parameter, the last one wins.  The
    group of --decoupled-lr has its own ``max_lr`` and ``min_lr``.
    """
    local_names = {p: name for chunk in model_chunks for name, p in chunk.named_parameters()}
    rules = get_standard_config_overrides(config) if overrides is None else overrides
    groups: dict[tuple[object, ...], ParamGroup] = {}
    configs: list[Any] = [getattr(chunk, "config", None) for chunk in model_chunks]
    width = next((c.mup_width_mult for c in configs if hasattr(c, "mup_width_mult")), 1.0)
    for name, param in trainable_parameters(model_chunks):
        own: ParamGroupOverride = {}
        for key, override in rules.items():
            if key.matches(param, name) or key.matches(param, local_names[param]):
                own |= override
        if overrides is None and no_weight_decay_cond is not None:
            own["wd_mult"] = 0.0 if no_weight_decay_cond(name, param) else 1.0
        wd_mult = own.get("wd_mult", 1.0)
        own_lr_mult = lr_mult if scale_lr_cond is not None and scale_lr_cond(name, param) else 1.0
        lr_factor, wd_factor = mup_factors(config, name, param, width)
        own_lr_mult *= lr_factor
        wd_mult *= wd_factor
        # Without a scheduler the peak learning rate applies from the first step.
        peak = own.get("max_lr", config.lr) or 0.0
        group: ParamGroup = {
            "params": [],
            "wd_mult": wd_mult,
            "lr_mult": own_lr_mult,
            "is_expert_parallel": info_of(param).is_expert,
            "is_decoupled_lr": overrides is None and "max_lr" in own,
            "lr": peak * own_lr_mult,
            "weight_decay": config.weight_decay * wd_mult,
        }
        if config.has_matrix_rule:
            group["is_matrix"] = is_matrix(name, param)
        if own.keys() & {"max_lr", "min_lr"}:
            group["max_lr"] = peak
            group["min_lr"] = own.get("min_lr", config.min_lr or 0.0)
        _, *settings = group.values()
        groups.setdefault(tuple(settings), group)["params"].append(param)
    return list(groups.values())
