"""Megatron Core's API of expert layers: its formulas, and classes that projects override."""

from __future__ import annotations

from dataclasses import replace
from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core.dist_checkpointing.module_state import sharded_state_dict_default
from megatron.core.params.param_info import name_parameters
from megatron.core.params.param_init import initialize_parameters
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe import moe_utils  # type: ignore[attr-defined]
from megatron.core.transformer.moe.experts import (
    Experts,
    SequentialMLP,
    TEColumnParallelGroupedLinear,
    TEGroupedMLP,
    TERowParallelGroupedLinear,
)
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from megatron.core.transformer.moe.routing import RoutingResult
from tests.support.one_process import one_process_groups, tiny_config

TOKENS, EXPERTS, TOPK = 12, 6, 2


def logits_of(seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(TOKENS, EXPERTS, generator=generator, dtype=torch.float64)


def config_of(**changes: Any) -> Any:
    options = {
        "num_moe_experts": EXPERTS,
        "moe_router_topk": TOPK,
        "ffn_hidden_size": 8,
        "hidden_size": 4,
        "num_attention_heads": 1,
        "add_bias_linear": False,
        "init_method_std": 0.5,
        "params_dtype": torch.float64,
        "moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss"),
        "moe_aux_loss_coeff": (0.1, 0.2),
        "moe_z_loss_coeff": 0.3,
    }
    return tiny_config(**options | changes)


def layer_of(**changes: Any) -> MoELayer:
    """Build a layer as a project does, without groups."""
    matrices = MLPSubmodules(ColumnParallelLinear, RowParallelLinear)
    layer = MoELayer(config_of(**changes), MoESubmodules(matrices), 1)  # type: ignore[call-arg]
    name_parameters(layer)
    initialize_parameters(layer, 5)
    return layer


def outcome(layer: MoELayer, x: Tensor) -> list[Tensor]:
    """Return the output, all gradients and the auxiliary losses of one pass."""
    x = x.clone().requires_grad_()
    y, _ = layer(x)
    layer.zero_grad()
    y.square().sum().backward()
    grads = [p.grad for p in layer.parameters() if p.grad is not None]
    losses = layer.router.aux_losses.take()
    return [y.detach(), x.grad, *grads, *(losses[name] for name in sorted(losses))]


def dense_routing(router: TopKRouter, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Route as projects that replace `TopKRouter.routing` do, with [tokens, experts] tensors."""
    s, b = logits.shape[:2]
    flat = router.apply_z_loss(logits.flatten(0, 1))
    probs, routing_map = moe_utils.topk_routing_with_score_function(
        flat, router.topk, score_function=router.score_function, expert_bias=router.expert_bias
    )
    assert router.is_aux_loss_enabled()
    chosen, scores = moe_utils.compute_routing_scores_for_aux_loss(
        flat, router.topk, router.score_function
    )
    of_router: Any = router
    probs = of_router._apply_aux_loss(probs, scores, chosen)
    probs = of_router._apply_seq_aux_loss(probs, scores, chosen, s, b)
    return of_router._apply_global_aux_loss(probs, scores, chosen), routing_map


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_a_replaced_routing_with_megatrons_pair_computes_the_same(score_function: str) -> None:
    layer = layer_of(moe_router_score_function=score_function)
    x = torch.randn(6, 2, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = outcome(layer, x)
    layer.router.routing = MethodType(dense_routing, layer.router)
    for found, wanted in zip(outcome(layer, x), expected, strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_roots_of_tiny_scores_have_a_gradient(dtype: torch.dtype) -> None:
    """The softplus of the last logit is 0 in float32."""
    logits = torch.tensor([[3.0, 1.0, -1.0, -300.0]], dtype=dtype, requires_grad=True)
    probs, _ = moe_utils.topk_routing_with_score_function(
        logits, 4, score_function="sqrtsoftplus", fused=True
    )
    scores = logits.detach().double().exp().log1p().sqrt()
    torch.testing.assert_close(probs.double(), scores / scores.sum(), rtol=1e-2, atol=1e-6)
    (probs * torch.arange(4)).sum().backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


def test_overridden_steps_of_the_layer_take_part() -> None:
    class Doubled(MoELayer):
        def router_and_preprocess(self, hidden_states, *masks):
            tokens, routing, residual = super().router_and_preprocess(hidden_states, *masks)
            return 2 * tokens, routing, residual

        def combine(self, output, shared_expert_output):
            return super().combine(output, shared_expert_output) + 1

    layer = layer_of(
        activation_func=torch.nn.Identity(),  # a linear expert
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=0.1,
    )
    assert layer.router.routing_type == "aux_loss"
    assert layer.router.get_aux_loss_coeff("aux_loss") == 0.1
    x = torch.randn(3, 2, 4, dtype=torch.float64)
    plain, _ = layer(x)
    layer.__class__ = Doubled
    torch.testing.assert_close(layer(x)[0], 2 * plain + 1)


@pytest.mark.parametrize("metadata", [None, {"singleton_local_shards": True}])
def test_checkpoints_do_not_depend_on_the_names_of_local_experts(metadata: Any) -> None:
    """On the second of two expert-parallel ranks, whose experts are numbers 3 to 5."""
    config = config_of()
    groups = replace(one_process_groups(), ep=ProcessGroup(1, 2))
    matrices = MLPSubmodules(ColumnParallelLinear, RowParallelLinear)
    grouped = MLPSubmodules(TEColumnParallelGroupedLinear, TERowParallelGroupedLinear)
    saved = []
    for experts in (
        Experts(config, matrices, range(3, 6), pg_collection=groups),
        SequentialMLP(3, config, matrices, pg_collection=groups),
        TEGroupedMLP(3, config, grouped, pg_collection=groups),
    ):
        name_parameters(experts)
        initialize_parameters(experts, 5)
        entries = experts.sharded_state_dict("mlp.experts.", (), metadata)
        assert {f"mlp.experts.{name}" for name in experts.state_dict()} == entries.keys()
        saved.append({(e.key, e.global_offset): e.data for e in entries.values()})
    assert len(saved[0]) == 6
    for other in saved[1:]:
        torch.testing.assert_close(other, saved[0], rtol=0, atol=0)


class Adapted(torch.nn.Module):
    """A module around a layer, as Megatron-Bridge's adapters."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.to_wrap = layer
        self.adapter = torch.nn.Linear(layer.in_features, layer.out_features, dtype=torch.float64)

    def forward(self, x: Tensor, counts: Any) -> Any:
        y, bias = self.to_wrap(x, counts)
        return y + self.adapter(x), bias

    def sharded_state_dict(self, prefix: str, sharded_offsets: Any, metadata: Any) -> Any:
        entries = self.to_wrap.sharded_state_dict(prefix, sharded_offsets, metadata)
        adapter = sharded_state_dict_default(
            self.adapter, f"{prefix}adapter.", sharded_offsets, metadata
        )
        return {**entries, **adapter}


def test_grouped_experts_compute_and_save_with_adapters_around_their_layers() -> None:
    grouped = MLPSubmodules(TEColumnParallelGroupedLinear, TERowParallelGroupedLinear)
    experts: Any = TEGroupedMLP(3, config_of(), grouped, pg_collection=one_process_groups())
    name_parameters(experts)
    initialize_parameters(experts, 5)
    plain = experts.sharded_state_dict("mlp.experts.")
    x = torch.randn(5, 4, dtype=torch.float64)
    first = experts.linear_fc1(x, [2, 1, 2])[0]
    experts.linear_fc1 = Adapted(experts.linear_fc1)
    wanted = first + experts.linear_fc1.adapter(x)
    y, _ = experts(x, [2, 1, 2], torch.ones(5, dtype=torch.float64))
    torch.testing.assert_close(y, experts.linear_fc2(experts.activate(wanted), [2, 1, 2])[0])
    entries = experts.sharded_state_dict("mlp.experts.")
    assert entries.keys() - plain.keys() == {
        "mlp.experts.linear_fc1.adapter.weight",
        "mlp.experts.linear_fc1.adapter.bias",
    }
    for name, entry in plain.items():
        assert (entries[name].key, entries[name].global_offset) == (entry.key, entry.global_offset)
    adapter = entries["mlp.experts.linear_fc1.adapter.weight"]
    assert adapter.key == "mlp.experts.experts.linear_fc1.adapter.weight"


def test_hooks_and_replaced_experts_use_megatrons_pairs() -> None:
    layer: Any = layer_of()
    x = torch.randn(6, 2, 4, dtype=torch.float64)
    plain, _ = layer(x)
    hook = layer.router.register_forward_hook(lambda _, args, out: (2 * out[0], out[1]))
    torch.testing.assert_close(layer(x)[0], 2 * plain)
    hook.remove()
    for expert in layer.experts.local_experts.children():
        expert.forward = lambda rows, weights: (0 * rows, rows * weights.unsqueeze(1))
    torch.testing.assert_close(layer(x)[0], x)


def test_tokens_of_experts_are_counted_from_a_map_too() -> None:
    router = layer_of(
        moe_router_enable_expert_bias=True,
        moe_router_score_function="sigmoid",
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
    ).router
    _, routing_map = router(torch.randn(6, 2, 4, dtype=torch.float64))
    counts = router.local_tokens_per_expert
    assert counts.tolist() == routing_map.sum(0).tolist()
    padding = torch.zeros(TOKENS, 1, dtype=torch.bool)
    padding[:3] = True
    router._apply_expert_bias(routing_map, padding_mask=padding)
    assert counts.tolist() == (routing_map.sum(0) + routing_map[3:].sum(0)).tolist()


def test_routes_are_recorded_and_replayed() -> None:
    """Choices are those of the recording, weights follow from the logits of the pass."""
    RouterReplay.clear_global_router_replay_instances()
    router = layer_of(moe_enable_routing_replay=True).router
    first, second = (logits_of(seed).view(6, 2, EXPERTS) for seed in (1, 2))
    RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
    recorded = router.routing(first).experts
    (data,) = RouterReplay.get_recorded_data()
    assert data is not None
    assert data.equal(recorded)
    with pytest.raises(ValueError, match="2 tensors of choices for 1 routers"):
        RouterReplay.set_replay_data([data, data])
    RouterReplay.set_replay_data([data])
    for action in (RouterReplayAction.REPLAY_FORWARD, RouterReplayAction.REPLAY_BACKWARD):
        RouterReplay.set_global_router_replay_action(action)
        replayed = router.routing(second)
        assert replayed.experts.equal(recorded)
        weights = torch.softmax(second.flatten(0, 1).gather(1, recorded), -1)
        torch.testing.assert_close(replayed.weights, weights)
    RouterReplay.clear_global_router_replay_action()
    assert not router.routing(second).experts.equal(recorded)


def test_a_routing_converts_to_megatrons_pair_and_back() -> None:
    """Also with dropped visits, and with other numbers of experts per token."""
    experts = torch.tensor([[1, 0], [EXPERTS, 3], [EXPERTS, EXPERTS]])
    weights = torch.tensor([[0.7, 0.3], [0.0, 0.4], [0.0, 0.0]])
    probs, routing_map = RoutingResult(experts, weights, EXPERTS)
    assert routing_map.sum(1).tolist() == [2, 1, 0]
    assert probs[0, 1] == 0.7
    back = RoutingResult.of((probs, routing_map))
    assert back.experts.tolist() == [[1, 0], [3, EXPERTS], [EXPERTS, EXPERTS]]
    torch.testing.assert_close(back.weights, torch.tensor([[0.7, 0.3], [0.4, 0.0], [0.0, 0.0]]))


@pytest.mark.parametrize("drop_and_pad", [False, True])
def test_permuted_rows_return_to_their_tokens(drop_and_pad: bool) -> None:
    probs, routing_map = moe_utils.topk_routing_with_score_function(logits_of(), TOPK)
    count = None
    if drop_and_pad:
        capacity = moe_utils.get_capacity(TOKENS * TOPK, EXPERTS, 0.5)
        count = capacity * EXPERTS
        probs, routing_map = moe_utils.apply_router_token_dropping(
            probs, routing_map, TOPK, 0.5, pad_to_capacity=True
        )
        assert routing_map.sum(0).tolist() == [capacity] * EXPERTS
    x = torch.randn(TOKENS, 3, dtype=torch.float64)
    rows, weights, order = moe_utils.permute(
        x, routing_map, probs, num_out_tokens=count, drop_and_pad=drop_and_pad
    )
    assert rows.equal(x[order])
    back = moe_utils.unpermute(
        rows, order, x.shape, probs=probs, routing_map=routing_map, drop_and_pad=drop_and_pad
    )
    torch.testing.assert_close(back, x * probs.sum(1, keepdim=True))
    weighed = moe_utils.unpermute(rows * weights.unsqueeze(1), order, x.shape)
    torch.testing.assert_close(weighed, back)


def test_dropping_keeps_the_largest_weights_or_the_first_tokens() -> None:
    probs, routing_map = moe_utils.topk_routing_with_score_function(logits_of(), TOPK)
    capacity = moe_utils.get_capacity(TOKENS * TOPK, EXPERTS, 0.5)
    position = -torch.arange(TOKENS, dtype=torch.float64).unsqueeze(1)
    for policy, rank in (("probs", probs), ("position", position)):
        kept, kept_map = moe_utils.apply_router_token_dropping(
            probs, routing_map, TOPK, 0.5, policy
        )
        ranks = rank.expand_as(probs).masked_fill(~routing_map, -torch.inf).sort(0).values
        for expert in range(EXPERTS):
            visits = int(routing_map[:, expert].sum())
            assert kept_map[:, expert].sum() == min(visits, capacity)
            low = ranks[-min(visits, capacity), expert]
            assert (rank.expand_as(probs)[kept_map[:, expert], expert] >= low).all()
        assert kept.equal(probs * kept_map)
    with pytest.raises(ValueError, match="Invalid drop_policy"):
        moe_utils.apply_router_token_dropping(probs, routing_map, TOPK, 0.5, "last")


def test_routing_functions_compute_their_formulas() -> None:
    logits = logits_of()
    scores = torch.softmax(logits, -1)
    best, experts = moe_utils.group_limited_topk(scores, 2, TOKENS, EXPERTS, 3, 1)
    for row, chosen in zip(scores, experts, strict=True):  # one group of two experts
        sums = row.view(3, 2).sum(1)
        assert {*chosen.tolist()} == {2 * int(sums.argmax()), 2 * int(sums.argmax()) + 1}
    assert best.equal(scores.gather(1, experts))
    bias = torch.linspace(-1, 1, EXPERTS, dtype=torch.float64)
    probs, routing_map = moe_utils.topk_routing_with_score_function(
        logits, TOPK, score_function="sigmoid", expert_bias=bias, scaling_factor=2.5
    )
    chosen = (torch.sigmoid(logits) + bias).topk(TOPK).indices
    weights = torch.sigmoid(logits).gather(1, chosen)
    weights = 2.5 * weights / weights.sum(-1, keepdim=True)
    torch.testing.assert_close(probs, torch.zeros_like(logits).scatter(1, chosen, weights))
    assert routing_map.equal(probs > 0)
    balance = moe_utils.switch_load_balancing_loss_func(
        torch.full_like(scores, 1 / EXPERTS),
        torch.full((EXPERTS,), TOKENS * TOPK / EXPERTS),
        TOKENS,
        TOPK,
        EXPERTS,
        0.01,
    )
    assert float(balance) == pytest.approx(0.01)
    x, order = torch.arange(6.0), torch.tensor([2, 0, 1])
    parts, same = moe_utils.sort_chunks_by_idxs(x, torch.tensor([1, 2, 3]), order, probs=x)
    assert parts.tolist() == [3, 4, 5, 0, 1, 2]
    assert same.equal(parts)


def test_gradients_of_router_functions() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    weight = torch.randn(EXPERTS, 4, requires_grad=True)
    found = moe_utils.RouterGatingLinearFunction.apply(x, weight, torch.float64)
    expected = F.linear(x.double(), weight.double())
    assert found.dtype == torch.float64
    for own, wanted in zip(
        torch.autograd.grad(found.square().sum(), (x, weight)),
        torch.autograd.grad(expected.square().sum(), (x, weight)),
        strict=True,
    ):
        torch.testing.assert_close(own, wanted)
    random = moe_utils.apply_random_logits(x)
    (grad,) = torch.autograd.grad((random * 3).sum(), x)
    assert not random.equal(x)
    assert grad.eq(3).all()


def test_losses_of_routers_and_of_projects_are_logged_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scaler = moe_utils.MoEAuxLossAutoScaler
    monkeypatch.setattr(scaler, "main_loss_backward_scale", None)
    monkeypatch.setattr("megatron.core.aux_loss.AuxLosses.weight", 1.0)
    moe_utils.get_moe_layer_wise_logging_tracker().clear()
    layer = layer_of()
    x = torch.randn(6, 2, 4, dtype=torch.float64)
    z_grad = []
    for scale in (1.0, 4.0):  # the scale also applies to the losses of layers
        scaler.set_loss_scale(torch.tensor(scale))
        layer.zero_grad()
        routed = layer.router(x)
        (routed.weights * 0).sum().backward()
        z_grad.append(layer.router.weight.grad)
    torch.testing.assert_close(z_grad[1], 4 * z_grad[0])
    values = torch.stack([routed.weights.new_tensor(2.0), routed.weights.new_tensor(3.0)])
    leaf = torch.ones(2, requires_grad=True)
    scaler.apply(leaf, (leaf * leaf).sum()).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [9.0, 9.0]  # 1, and 4 times 2
    for loss in values:
        moe_utils.save_to_aux_losses_tracker("own", loss, 2, 2)
    totals: dict[str, Tensor] = {}
    logged: list[tuple[str, float]] = []

    class Writer:
        def add_scalar(self, name: str, value: Any, iteration: int) -> None:
            assert iteration == 7
            logged.append((name, float(value)))

    moe_utils.track_moe_metrics(
        0.5, 7, Writer(), total_loss_dict=totals, per_layer_logging=True, num_layers=2
    )
    assert float(totals["own"]) == pytest.approx(0.5 * 5 / 2)
    assert ("moe/own_layer_1", 2.5) in logged
    assert {"load_balancing_loss", "seq_load_balancing_loss", "z_loss"} < totals.keys()
    assert all(
        not e["values"].any() for e in moe_utils.get_moe_layer_wise_logging_tracker().values()
    )
