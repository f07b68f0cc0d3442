"""Errors of parallel training that no message reports, planted into single steps of a run.

``--callback tests.support.planted_errors:Planted`` plants the errors that the environment variable
PLANTED names, one for each step: ``PLANTED="- sinks"`` leaves the first step correct.  The names
are those of the cases in tools/lib/layout_cases.py.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor

from megatron.core.models.bert import bert_model
from megatron.core.optimizer import clip_grads
from megatron.core.params.param_info import ParamInfo
from megatron.core.transformer.moe import router
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlock
from megatron.training.callbacks import Callback, StepResult, TrainingRun

NAME = "PLANTED"
# The package has a function of this name.
finalizing = importlib.import_module("megatron.core.distributed.finalize_model_grads")
_ONE = dist.ProcessGroup(0, 1)


class Planted(Callback):
    """Plants an error before a step, and removes it after the step."""

    def __init__(self) -> None:
        self._stack = ExitStack()

    def on_step_start(self, run: TrainingRun) -> None:
        names = os.environ[NAME].split()
        name = names[min(run.state.iteration, len(names) - 1)]
        if name != "-":
            where, attribute, make = ERRORS[name]
            wrong = make(getattr(where, attribute), run.groups)
            self._stack.enter_context(mock.patch.object(where, attribute, wrong))

    def on_step_end(self, run: TrainingRun, result: StepResult) -> None:
        self._stack.close()


def _mean_of_own_tokens(attach: Any, groups: Any) -> Any:
    def wrong(self: Any, hidden: Tensor, depth: int, losses: Tensor, ahead: Any) -> Tensor:
        mask = ahead.loss_mask * (ahead.loss_mask.numel() / ahead.loss_mask.sum())
        return attach(self, hidden, depth, losses, replace(ahead, loss_mask=mask))

    return wrong


def _own_tokens(total: Any, groups: Any) -> Any:
    def wrong(num_tokens: Tensor, groups: Any) -> Tensor:
        alone = SimpleNamespace(pp=groups.pp, dp_cp=_ONE)
        return total(num_tokens, alone) * groups.dp_cp.size()

    return wrong


def _masked_on_first_rank(hidden_keys: Any, groups: Any) -> Any:
    return lambda mask: hidden_keys(mask if groups.tp.rank() == 0 else None)


def _sinks_count_once(counts: Any, groups: Any) -> Any:
    def wrong(info: ParamInfo, groups: Any) -> bool:
        is_elsewhere = info.name.endswith("softmax_offset") and groups.tp.rank() > 0
        return counts(info, groups) and not is_elsewhere

    return wrong


def _norms_count_often(counts: Any, groups: Any) -> Any:
    return lambda info, groups: counts(info, groups) or "norm" in info.name


def _without(*names: str) -> Callable[[Any, Any], Any]:
    """Return an error that leaves partial gradients of parameters with ``names`` as they are."""

    def make(used: Any, groups: Any) -> Any:
        def wrong(model: Any, is_summed: Any) -> Iterator[Any]:
            def is_kept(param: Any, info: ParamInfo) -> bool:
                is_left = info.sequence_parallel and any(name in info.name for name in names)
                return is_summed(param, info) and not is_left

            return used(model, is_kept)

        return wrong

    return make


def _experts_of_this_rank(add: Any, groups: Any) -> Any:
    def wrong(pair: Tensor, groups: Any, is_sharded: bool) -> Tensor:
        return add(pair, SimpleNamespace(mp=groups.mp, tp_ep_pp=groups.mp), is_sharded)

    return wrong


def _experts_as_dense(reduce: Any, groups: Any) -> Any:
    def wrong(model: Any, num_tokens: Tensor | None, groups: Any) -> None:
        reduce(model, num_tokens, groups)
        for _, grad in finalizing._used_gradients(model, lambda _, info: info.is_expert):
            grad.mul_(groups.dp_cp.size() / groups.expt_dp.size())

    return wrong


def _own_balance(update: Any, groups: Any) -> Any:
    return lambda models, groups: update(models, SimpleNamespace(tp_dp_cp=_ONE))


def _own_z_loss(apply: Any, groups: Any) -> Any:
    return lambda self, logits, num_tokens, padding: apply(self, logits, len(logits), padding)


# Case -> where a function is, its name, and what makes the wrong function of it and the groups.
ERRORS: dict[str, tuple[Any, str, Callable[[Any, Any], Any]]] = {
    "mtp-tokens": (MultiTokenPredictionBlock, "attach", _mean_of_own_tokens),
    "token-counts": (finalizing, "total_tokens", _own_tokens),
    "padding-mask": (bert_model, "_hidden_keys", _masked_on_first_rank),
    "sinks": (clip_grads, "counts_here", _sinks_count_once),
    "norm-copies": (clip_grads, "counts_here", _norms_count_often),
    "norm-gradients": (finalizing, "_used_gradients", _without("norm")),
    "replicated-weights": (finalizing, "_used_gradients", _without("router", "down_proj")),
    "expert-norm": (clip_grads, "_sum_over_model", _experts_of_this_rank),
    "expert-gradients": (finalizing, "reduce_model_grads", _experts_as_dense),
    "balance-counts": (
        router.TopKRouter,
        "_sum_over_sharers",
        lambda *_: lambda self, counts: counts,
    ),
    "expert-bias": (router, "update_expert_biases", _own_balance),
    "z-loss": (router.TopKRouter, "apply_z_loss", _own_z_loss),
    "tied-embedding": (finalizing, "sum_tied_gradients", lambda *_: lambda model, groups: None),
}
