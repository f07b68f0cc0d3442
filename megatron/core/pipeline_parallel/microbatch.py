"""The loss of a micro-batch, and the hooks of a step.

The loss of a step does not depend on the layout.  It is a mean over micro-batches of a mean over
tokens, and the data-parallel wrapper averages over its ranks; with a loss per token it is a sum,
which `finalize_model_grads` divides by the number of tokens of the global batch.

Collective: with context parallelism the number of tokens is summed over cp.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron.core import device
from megatron.core.config.errors import ConfigError
from megatron.core.diagnostics.timers import Timers, timed
from megatron.core.parallel.collectives import all_reduce_over
from megatron.core.pipeline_parallel.plan import PassKind


@dataclass(frozen=True, kw_only=True)
class StepHooks:
    """Optional callables of a step; without them it only runs forward and backward passes."""

    # Multiplies the loss before backward (loss scale).
    grad_scale_func: Callable[[Tensor], Tensor] | None = None
    # Called once after the last backward pass with the model chunks and, for a loss per token,
    # the number of tokens of this rank.
    finalize_model_grads_func: Callable[[Sequence[Any], Tensor | None], None] | None = None
    # Called with every loss and the index of its micro-batch, before backward.
    loss_check_func: Callable[[Tensor, int], None] | None = None
    # Called with the kind of each pass of a micro-batch before the pass begins.
    pass_func: Callable[[PassKind], None] | None = None
    # What a loss per token is divided by, as share of all tokens.  Auxiliary losses are means over
    # all tokens, and have to keep their weight beside a loss of few tokens, or of pairs of answers.
    loss_share: float = 1.0
    timers: Timers | None = None
    # Whether timers of level 1 synchronize all ranks before they start.
    barrier_with_level_1_timers: bool = True

    def timed(self, name: str, log_level: int = 2) -> AbstractContextManager[None]:
        """Return a context that measures its duration with the timer ``name``."""
        barrier = log_level == 1 and self.barrier_with_level_1_timers
        return timed(self.timers, name, log_level=log_level, barrier=barrier)


# A loss function also returns values to report, of any type, which the schedule returns unchanged.
LossFunc = Callable[..., Any]
ForwardStepFunc = Callable[[Any, nn.Module], tuple[Tensor, LossFunc]]


class StepLosses(list[Any]):
    """List of what the loss function reported for each micro-batch of a step.

    ``num_tokens``: number of tokens of this rank in all micro-batches, if the loss function
    returns it.
    """

    num_tokens: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class LossRule:
    """Scaling of a micro-batch's loss, so that gradients add up to those of the step's loss."""

    num_microbatches: int
    per_token: bool
    cp_group: ProcessGroup

    def scale(self, loss: Tensor, num_tokens: Tensor | None) -> Tensor:
        """Return this micro-batch's contribution to the step's loss.

        With ``num_tokens``, ``loss`` is a sum over this rank's tokens; without, it is this rank's
        share of a mean, whose shares sum to the mean over cp.  Collective over cp.
        """
        if self.per_token:
            if num_tokens is None:
                raise ConfigError(
                    "--calculate-per-token-loss: the loss function returned (loss, reported), "
                    "return (sum of losses, number of tokens, reported)"
                )
            return loss
        cp_size = self.cp_group.size()
        if num_tokens is not None:
            total = all_reduce_over(num_tokens.detach().clone(), self.cp_group)
            loss = loss / total.clamp(min=1)
        # Gradients are averaged over dp and cp: the factor keeps the sum over cp.
        return loss * (cp_size / self.num_microbatches)

    def aux_weight(self, hooks: StepHooks) -> float | Tensor:
        """Return the factor of the gradient of auxiliary losses, which layers add to the graph.

        An auxiliary loss counts once per micro-batch; with a loss per token, once per token, times
        `StepHooks.loss_share`.
        """
        is_sum = self.per_token
        weight = hooks.loss_share if is_sum else self.cp_group.size() / self.num_microbatches
        if hooks.grad_scale_func is None:
            return weight
        return hooks.grad_scale_func(torch.full((), weight, device=device.current()))
