"""The dispatcher of DeepEP on a stand-in that does what the package's documentation says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.transformer.moe import deep_ep, moe_layer, token_dispatcher
from tests.distributed.test_experts import LAYOUTS, Layout, needs_the_plain_answer, on_ranks
from tests.support.ranks import run_ranks

SITUATIONS = ("plain", "top-3", "sigmoid-groups", "capacity-padded", "all-to-one", "biases", "few")


class Event:
    def __init__(self, async_finish: bool) -> None:
        assert async_finish

    def current_stream_wait(self) -> None:
        pass


class Buffer:
    """deep_ep.Buffer over gloo."""

    made = 0

    def __init__(self, group: Any, num_nvl_bytes: int, num_rdma_bytes: int) -> None:
        assert (num_nvl_bytes, num_rdma_bytes) == (800, 0)
        self.group = group
        Buffer.made += 1

    @staticmethod
    def set_num_sms(num_sms: int) -> None:
        assert num_sms == 20

    @staticmethod
    def get_dispatch_config(size: int) -> Any:
        return SimpleNamespace(
            get_nvl_buffer_size_hint=lambda row_bytes, size: 100 * row_bytes // 8,
            get_rdma_buffer_size_hint=lambda row_bytes, size: 0,
        )

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int) -> tuple[Any, ...]:
        ranks = topk_idx // (num_experts // self.group.size())
        is_in_rank = (ranks.unsqueeze(-1) == torch.arange(self.group.size())).any(1)
        per_expert = torch.bincount(topk_idx[topk_idx >= 0], minlength=num_experts)
        return is_in_rank.sum(0), None, per_expert, is_in_rank, None

    def dispatch(self, x: Tensor, handle: Any = None, **told: Any) -> tuple[Any, ...]:
        event = Event(told["async_finish"])
        if handle is not None:
            return self._there(x, handle), None, None, None, None, event
        numbers, size = told["topk_idx"], self.group.size()
        assert numbers.dtype == torch.int64
        per_rank = len(told["num_tokens_per_expert"]) // size
        tokens = [told["is_token_in_rank"][:, rank].nonzero().flatten() for rank in range(size)]
        sending = torch.tensor([len(t) for t in tokens])
        assert torch.equal(sending, told["num_tokens_per_rank"])
        receiving = torch.empty_like(sending)
        dist.all_to_all_single(receiving, sending, group=self.group)
        handle = (torch.cat(tokens), sending.tolist(), receiving.tolist(), len(x))
        here = self._there(numbers, handle) - self.group.rank() * per_rank
        is_here = (here >= 0) & (here < per_rank)
        weights = self._there(told["topk_weights"], handle).masked_fill(~is_here, 0.0)
        here = here.masked_fill(~is_here, -1)
        counts = torch.bincount(here[is_here], minlength=per_rank).tolist()
        return self._there(x, handle), here, weights, counts, handle, event

    def combine(
        self, x: Tensor, handle: Any, topk_weights: Tensor | None = None, *, async_finish: bool
    ) -> tuple[Tensor, Tensor | None, Event]:
        return self._home(x, handle), self._home(topk_weights, handle), Event(async_finish)

    def _there(self, x: Tensor, handle: Any) -> Tensor:
        tokens, sending, receiving, _ = handle
        out = x.new_empty((sum(receiving), x.shape[1]))
        dist.all_to_all_single(out, x[tokens], receiving, sending, group=self.group)
        return out

    def _home(self, x: Tensor | None, handle: Any) -> Any:
        if x is None:
            return None
        tokens, sending, receiving, num_tokens = handle
        rows = x.new_empty((sum(sending), x.shape[1]))
        dist.all_to_all_single(rows, x, sending, receiving, group=self.group)
        return x.new_zeros((num_tokens, x.shape[1])).index_add_(0, tokens, rows)


def by_deep_ep(rank: int, size: int, layout: Layout) -> Any:
    device_is_asked = AssertionError("the host has the counts")
    with (
        mock.patch.object(token_dispatcher, "counts_of", side_effect=device_is_asked),
        mock.patch.object(moe_layer, "unsupported_reason", return_value=None),
        mock.patch.object(deep_ep, "require", return_value=SimpleNamespace(Buffer=Buffer)),
        mock.patch.object(Tensor, "float", Tensor.double),  # else weights are rounded
    ):
        found = on_ranks(rank, size, layout, list(SITUATIONS), "deep_ep")
    assert Buffer.made == 1  # for all these layers
    return found


@pytest.mark.parametrize("name", ["tp2-ep2-etp2", "cp2-ep2"])
def test_tokens_travel_by_deep_ep(name: str) -> None:
    needs_the_plain_answer(run_ranks(by_deep_ep, LAYOUTS[name].world, LAYOUTS[name]), LAYOUTS[name])


def test_what_is_missing_is_named() -> None:
    config: Any = SimpleNamespace(params_dtype=torch.float32)
    assert deep_ep.unsupported_reason(config, torch.device("cpu")) == "it needs a GPU"
    assert deep_ep.unsupported_reason(config, torch.device("cuda")) == "it sends bf16 alone"
    config = SimpleNamespace(params_dtype=torch.bfloat16)
    assert deep_ep.unsupported_reason(config, torch.device("cuda")) == "deep_ep is not installed"


def test_a_buffer_grows_with_the_rows_of_its_group() -> None:
    groups = [mock.Mock(**{"size.return_value": 2}) for _ in range(2)]
    config: Any = mock.Mock(get_nvl_buffer_size_hint=int.__mul__, get_rdma_buffer_size_hint=max)
    kind = mock.Mock(side_effect=lambda group, nvl, rdma: (group, nvl, rdma))
    kind.get_dispatch_config.return_value = kind.get_combine_config.return_value = config
    asked = [(groups[0], 8), (groups[0], 4), (groups[1], 4), (groups[0], 16), (groups[0], 8)]
    with mock.patch.object(deep_ep, "require", return_value=SimpleNamespace(Buffer=kind)):
        given = [deep_ep.get_buffer(group, row_bytes, 20) for group, row_bytes in asked]
    assert [nvl for _, nvl, _ in given] == [16, 16, 8, 32, 32]
    assert kind.call_count == 3
