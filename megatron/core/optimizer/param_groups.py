"""Which parameters share a learning rate and a weight decay."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.params.param_info import info_of

_HEADS = ("output_layer", "lm_head", "binary_head", "pooler")  # of a model's attributes
ParamCondition = Callable[[str, nn.Parameter], bool]


def no_weight_decay_on_vectors(name: str, param: nn.Parameter) -> bool:
    """Biases and norms do not decay."""
    return name.endswith(".bias") or param.dim() == 1


def no_weight_decay_on_embeddings(name: str, param: nn.Parameter) -> bool:
    """As above, nor do embeddings: for models whose embeddings start with a spread of their own."""
    return no_weight_decay_on_vectors(name, param) or "embedding" in name


def is_matrix(name: str, param: nn.Parameter) -> bool:
    """Whether Muon updates a parameter.  A router's weight is a matrix, positions are not."""
    info = info_of(param)
    return (
        len(info.global_shape) == 2
        and min(info.global_shape) > 1
        and not info.is_embedding_or_output
        and "embedding" not in name
        and "relative_attention_bias" not in name
    )


def trainable_parameters(model_chunks: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """Layout-free names and parameters of this rank, in model order."""
    for chunk in model_chunks:
        for local_name, param in chunk.named_parameters():
            if param.requires_grad:
                yield info_of(param).name or without_wrappers(local_name), param


def without_wrappers(name: str) -> str:
    """Wrappers (data parallelism, half precision) hold the model as ``module``."""
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def is_of_head(name: str, param: nn.Parameter) -> bool:
    """Whether a parameter is of the output layer or of one of BERT's heads."""
    return without_wrappers(name).split(".")[0] in _HEADS


def make_param_groups(
    model_chunks: Sequence[nn.Module],
    config: OptimizerConfig,
    *,
    no_weight_decay_cond: ParamCondition | None = None,
    scale_lr_cond: ParamCondition | None = None,
    lr_mult: float = 1.0,
) -> list[dict[str, Any]]:
    """torch.optim's groups, with what the scheduler multiplies: ``wd_mult`` and ``lr_mult``.

    ``lr_mult`` is for parameters that ``scale_lr_cond`` picks.  A group under --decoupled-lr has
    ``max_lr`` and ``min_lr`` of its own.
    """
    is_free_of_decay = no_weight_decay_cond or no_weight_decay_on_vectors
    groups: dict[tuple[float | bool, ...], dict[str, Any]] = {}
    for name, param in trainable_parameters(model_chunks):
        info = info_of(param)
        wd_mult = 0.0 if is_free_of_decay(name, param) else 1.0
        own_lr_mult = lr_mult if scale_lr_cond is not None and scale_lr_cond(name, param) else 1.0
        is_decoupled = config.decoupled_lr is not None and info.is_embedding_or_output
        own_rule = {"is_matrix": is_matrix(name, param)} if config.has_muon else {}
        key = (wd_mult, own_lr_mult, info.is_expert, is_decoupled, *own_rule.values())
        if key not in groups:
            groups[key] = {
                "params": [],
                "wd_mult": wd_mult,
                "lr_mult": own_lr_mult,
                "is_expert_parallel": info.is_expert,
                "is_decoupled_lr": is_decoupled,
                **own_rule,
                **_learning_rate(config, own_lr_mult, is_decoupled),
                "weight_decay": config.weight_decay * wd_mult,
            }
        groups[key]["params"].append(param)
    return list(groups.values())


def _learning_rate(config: OptimizerConfig, lr_mult: float, is_decoupled: bool) -> dict[str, float]:
    """The rate until a scheduler sets it, and a decoupled group's own range."""
    if not is_decoupled:
        return {"lr": (config.lr or 0.0) * lr_mult}
    assert config.decoupled_lr is not None
    floor = config.min_lr if config.decoupled_min_lr is None else config.decoupled_min_lr
    return {"lr": config.decoupled_lr * lr_mult, "max_lr": config.decoupled_lr, "min_lr": floor}
