"""Attention to another sequence, and the bias of relative positions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.enums import AttnBackend, AttnMaskType
from megatron.core.inference.contexts.static_context import StaticInferenceContext
from megatron.core.models.common.embeddings.relative_pos_embedding import (
    RelativePositionEmbedding,
    buckets_of,
)
from megatron.core.params.param_info import name_parameters
from megatron.core.params.param_init import Init, initialize_parameters
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import CrossAttention, CrossAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from tests.support import tolerances
from tests.support.one_process import one_process_groups, one_rank, tiny_config

SLOTS = CrossAttentionSubmodules(
    linear_q=ColumnParallelLinear,
    linear_kv=ColumnParallelLinear,
    core_attention=DotProductAttention,
    linear_proj=RowParallelLinear,
)


def cross(**changes: Any) -> CrossAttention:
    config = tiny_config(params_dtype=torch.float64, init_method_std=0.3, **changes)
    layer = CrossAttention(config, SLOTS, 1, pg_collection=one_process_groups())
    name_parameters(layer)
    initialize_parameters(layer, 3)
    return layer


def by_hand(layer: CrossAttention, x: Tensor, other: Tensor, hidden: Tensor) -> Tensor:
    """The formula on [s, b, h], one head at a time."""
    config, d = layer.config, layer.hidden_size_per_attention_head
    q = layer.linear_q(x)[0].unflatten(-1, (-1, d))
    kv = layer.linear_kv(other)[0].unflatten(-1, (config.num_query_groups, 2, d))
    times, outs = config.num_attention_heads // config.num_query_groups, []
    for head in range(config.num_attention_heads):
        k, v = kv[:, :, head // times].unbind(2)
        scores = torch.einsum("qbd,kbd->bqk", q[:, :, head], k) / d**0.5
        scores = scores.masked_fill(hidden[:, 0], float("-inf"))
        outs.append(torch.einsum("bqk,kbd->qbd", scores.softmax(-1), v))
    y, bias = layer.linear_proj(torch.cat(outs, -1))
    assert bias is None
    return y


@pytest.mark.feature("Model: cross attention to a masked sequence of another length")
@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("backend", [AttnBackend.auto, AttnBackend.unfused])
def test_queries_meet_the_visible_keys_of_the_other_sequence(
    groups: int, backend: AttnBackend
) -> None:
    layer = cross(num_query_groups=groups, attention_backend=backend, window_size=(1, 1))
    x, other = torch.randn(5, 2, 32).double(), torch.randn(7, 2, 32).double()
    x.requires_grad_()
    other.requires_grad_()
    hidden = torch.arange(7) >= torch.tensor([[7], [4]])
    hidden = hidden[:, None, None]
    y, _ = layer(x, hidden, key_value_states=other)
    wanted = by_hand(layer, x, other, hidden)
    torch.testing.assert_close(y, wanted, **tolerances.of(torch.float64))
    weights = [x, other, *layer.parameters()]
    grad = torch.randn_like(y)
    found = torch.autograd.grad(y, weights, grad)
    torch.testing.assert_close(
        found, torch.autograd.grad(wanted, weights, grad), **tolerances.of(torch.float64)
    )
    assert not found[1][4:, 1].any()


def test_a_cache_projects_the_other_sequence_once() -> None:
    layer, cache = cross().eval(), StaticInferenceContext(2, 9)
    x, other = torch.randn(3, 2, 32).double(), torch.randn(7, 2, 32).double()
    whole, _ = layer(x, key_value_states=other)
    for step in range(3):
        states = other if step == 0 else torch.zeros_like(other)
        y, _ = layer(x[step : step + 1], key_value_states=states, inference_context=cache)
        torch.testing.assert_close(y, whole[step : step + 1], **tolerances.of(torch.float64))
    cache.reset()
    after, _ = layer(x[:1], key_value_states=2 * other, inference_context=cache)
    expected, _ = layer(x[:1], key_value_states=2 * other)
    torch.testing.assert_close(after, expected, **tolerances.of(torch.float64))


@pytest.mark.feature("Model: relative position buckets and bias equal those of HF T5")
@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (8, 20)])
def test_buckets_are_those_of_transformers(
    bidirectional: bool, num_buckets: int, max_distance: int
) -> None:
    modeling = pytest.importorskip("transformers.models.t5.modeling_t5")
    distance = torch.arange(-400, 401)
    found = buckets_of(
        distance, bidirectional=bidirectional, num_buckets=num_buckets, max_distance=max_distance
    )
    wanted = modeling.T5Attention._relative_position_bucket(
        distance, bidirectional, num_buckets, max_distance
    )
    assert torch.equal(found, wanted)


def relative(bidirectional: bool = True) -> RelativePositionEmbedding:
    table = RelativePositionEmbedding(
        bidirectional, Init("normal", 1.0), 4, 8, 20, params_dtype=torch.float64,
        tp_group=one_rank(),
    )  # fmt: skip
    name_parameters(table)
    initialize_parameters(table, 3)
    return table


def test_the_bias_of_a_pair_is_that_of_its_bucket() -> None:
    table = relative()
    bias = table(5, 7, offset=2)
    assert bias.shape == (1, 4, 5, 7)
    distance = torch.arange(7) - torch.arange(2, 7)[:, None]
    buckets = buckets_of(distance, bidirectional=True, num_buckets=8, max_distance=20)
    weight = table.relative_attention_bias.weight
    wanted = weight[buckets].permute(2, 0, 1)[None]
    assert torch.equal(bias, wanted)
    grad = torch.randn_like(bias)
    torch.testing.assert_close(
        torch.autograd.grad(bias, weight, grad),
        torch.autograd.grad(wanted, weight, grad),
        **tolerances.of(torch.float64),
    )


@pytest.mark.parametrize("kind", [AttnMaskType.causal, AttnMaskType.padding])
@pytest.mark.parametrize("masked", [False, True])
def test_the_bias_has_the_same_gradient_on_every_path(kind: AttnMaskType, masked: bool) -> None:
    q, k, v = torch.randn(3, 9, 2, 4, 8, dtype=torch.float64).unbind(0)
    hidden = (torch.arange(9) >= torch.tensor([[9], [6]]))[:, None, None] if masked else None
    table, found = relative(kind is AttnMaskType.padding), []
    for backend in (AttnBackend.auto, AttnBackend.unfused):
        config = tiny_config(attention_backend=backend)
        core = DotProductAttention(config, 1, kind)
        out = core(q, k, v, hidden, attention_bias=table(9, 9))
        (grad,) = torch.autograd.grad(out.square().sum(), table.relative_attention_bias.weight)
        found.append((out.detach(), grad))
    torch.testing.assert_close(*found, **tolerances.of(torch.float64))
    assert found[0][1].any()
