"""Token dispatcher that uses the DeepEP package: it sends each token once to each rank it visits.

The interface is that of DeepEP's documentation for training (github.com/deepseek-ai/DeepEP).  The
package needs GPUs, so CPU tests use a stand-in with this interface.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core.autograd import Context, Function
from megatron.core.device import is_cuda
from megatron.core.optional import require, why_missing
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.pipeline_parallel.pass_interleaving import yield_to_peer
from megatron.core.rank_local import each_rank_owns
from megatron.core.tensor_parallel.mappings import through
from megatron.core.transformer.moe.routing import RoutingResult
from megatron.core.transformer.moe.token_dispatcher import (
    DispatchedTokens,
    Meanwhile,
    TokenDispatcher,
    sorted_here,
)
from megatron.core.transformer.transformer_config import TransformerConfig

PACKAGE = "deep_ep"


# A ``deep_ep.Buffer``, and the handle in which it stores the routing of a dispatch.
_Handled = tuple[Any, Any]


def unsupported_reason(config: TransformerConfig, device: torch.device) -> str | None:
    """Return why DeepEP cannot dispatch the tokens of this model; None if it can."""
    if not is_cuda(device):
        return "it needs a GPU"
    if config.params_dtype != torch.bfloat16:
        return "it sends bf16 alone"
    return why_missing(PACKAGE)


class DeepEPDispatcher(TokenDispatcher):
    """Dispatcher that uses DeepEP's dispatch and combine.  Collective over tp_ep."""

    def __init__(self, num_experts: int, groups: ProcessGroupCollection, num_sms: int) -> None:
        super().__init__(num_experts, groups)
        self.num_sms = num_sms

    def dispatch(
        self, x: Tensor, routing: RoutingResult, meanwhile: Meanwhile | None = None
    ) -> DispatchedTokens:
        buffer = get_buffer(self.tp_ep, get_hidden_bytes(x), self.num_sms)
        copies = self.expt_tp.size()
        # DeepEP assumes that a rank holds complete experts: with expert tensor parallelism, each
        # shard of an expert is an expert of its own to it.
        experts = routing.experts.unsqueeze(-1)
        shares = experts // self.num_local * copies + torch.arange(copies, device=x.device)
        numbers = shares * self.num_local + experts % self.num_local
        numbers = numbers.masked_fill(experts == self.num_experts, -1).flatten(1)
        weights = routing.weights.float().repeat_interleave(copies, dim=1)
        num_experts = self.num_local * self.tp_ep.size()
        sent: list[tuple[list[int], _Handled]] = []
        rows, weights, here = _Dispatch.apply(x, weights, numbers, num_experts, buffer, sent)
        counts, handled = sent[0]
        mine = here.masked_fill(here < 0, self.num_local)
        weights = weights.to(routing.weights.dtype)
        arrived = sorted_here(rows, RoutingResult(mine, weights, self.num_local), counts)

        def back(results: Tensor) -> Tensor:
            return through(arrived.back(results), handled, _combined, _dispatched)

        return DispatchedTokens(arrived.rows, arrived.weights, arrived.counts, back)


# Group -> (bytes per row that the buffer is made for, buffer).  A run that a fault ends, and that
# starts again in this process, drops them with its groups.
_buffers: dict[ProcessGroup, tuple[int, Any]] = {}
each_rank_owns(__name__, "_buffers")


def get_hidden_bytes(x: Tensor) -> int:
    """Return the bytes of a row that the buffer must hold, at least 2 per value."""
    return x.shape[1] * max(x.element_size(), 2)


def get_buffer(group: ProcessGroup, hidden_bytes: int, num_sms: int = 20) -> Any:
    """Return the buffer that all layers share.  Collective if it must be created or enlarged."""
    if group not in _buffers or _buffers[group][0] < hidden_bytes:
        kind = require(PACKAGE, "--moe-enable-deepep").Buffer
        kind.set_num_sms(num_sms)
        size = group.size()
        configs = kind.get_dispatch_config(size), kind.get_combine_config(size)
        nvl = max(config.get_nvl_buffer_size_hint(hidden_bytes, size) for config in configs)
        rdma = max(config.get_rdma_buffer_size_hint(hidden_bytes, size) for config in configs)
        _buffers[group] = hidden_bytes, kind(group, nvl, rdma)
    return _buffers[group][1]


def _wait(event: Any) -> None:
    """Wait for a DeepEP operation; an interleaved pass may compute in the meantime."""
    yield_to_peer()
    event.current_stream_wait()


class _Dispatch(Function[tuple[Tensor, Tensor, Tensor]]):
    """DeepEP dispatch; backward combines the gradients.

    Inputs: tokens [n, h], weights [n, k] and expert numbers [n, k], -1 for a dropped visit.
    Outputs: the r tokens that visit this rank [r, h], their weights [r, k], and their expert
    numbers on this rank [r, k], -1 for experts on other ranks.  The rows per local expert and the
    handle, which are not tensors, are appended to ``sent``.
    """

    @staticmethod
    def forward(
        ctx: Context[_Handled],
        x: Tensor,
        weights: Tensor,
        numbers: Tensor,
        num_experts: int,
        buffer: Any,
        sent: list[tuple[list[int], _Handled]],
    ) -> tuple[Tensor, Tensor, Tensor]:
        per_rank, per_node, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(
            numbers, num_experts
        )
        rows, here, weights, counts, handle, event = buffer.dispatch(
            x.contiguous(),
            topk_idx=numbers,
            topk_weights=weights,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=is_in_rank,
            num_tokens_per_expert=per_expert,
            async_finish=True,
        )
        _wait(event)
        ctx.values = buffer, handle
        sent.append((counts, ctx.values))
        ctx.mark_non_differentiable(here)
        return rows, weights, here

    @staticmethod
    def backward(
        ctx: Context[_Handled], grad: Tensor, grad_weights: Tensor, _: None
    ) -> tuple[Tensor | None, ...]:
        buffer, handle = ctx.values
        grad, grad_weights, event = buffer.combine(
            grad.contiguous(), handle, topk_weights=grad_weights.contiguous(), async_finish=True
        )
        _wait(event)
        return grad, grad_weights, None, None, None, None


def fused_combine(
    x: Tensor,
    group: ProcessGroup,
    handle: Any,
    async_finish: bool = False,
    allocate_on_comm_stream: bool = False,
) -> tuple[Tensor, None]:
    """Send results back to their tokens, and wait for them, as Megatron Core does.  Collective."""
    handled = get_buffer(group, get_hidden_bytes(x)), handle
    return through(x, handled, _combined, _dispatched), None


def _combined(results: Tensor, handled: _Handled) -> Tensor:
    buffer, handle = handled
    results, _, event = buffer.combine(results.contiguous(), handle, async_finish=True)
    _wait(event)
    return results


def _dispatched(grad: Tensor, handled: _Handled) -> Tensor:
    buffer, handle = handled
    grad, *_, event = buffer.dispatch(grad.contiguous(), handle=handle, async_finish=True)
    _wait(event)
    return grad
