"""A layer of experts on any ranks against a plain one: values, every gradient, every loss."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from unittest import mock
from zlib import crc32

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron.core.activations import quick_gelu
from megatron.core.config.errors import NonFiniteError
from megatron.core.distributed.non_finite import naming_step
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedBounds, PackedSeqParams
from megatron.core.parallel.context_parallel_partition import held_tokens
from megatron.core.parallel.process_groups_config import create_process_groups, make_grids
from megatron.core.params.param_info import info_of, name_parameters
from megatron.core.params.param_init import initialize_parameters
from megatron.core.rerun.results import RerunMode
from megatron.core.rerun.state_machine import (
    get_rerun_state_machine,
    initialize_rerun_state_machine,
)
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe import token_dispatcher
from megatron.core.transformer.moe.experts import (
    SequentialMLP,
    TEColumnParallelGroupedLinear,
    TEGroupedMLP,
    TERowParallelGroupedLinear,
)
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter, loss_name
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from tests.support import moe_reference as plain
from tests.support import selection
from tests.support.one_process import one_process_groups, tiny_config
from tests.support.ranks import run_ranks

SEQUENCE, BATCH, HIDDEN, EXPERTS = 8, 2, 8, 4
BALANCE = ("aux_loss", "seq_aux_loss", "global_aux_loss")
COEFFICIENTS = {"moe_router_load_balancing_type": BALANCE}
COEFFICIENTS |= {"moe_aux_loss_coeff": (0.3, 0.2, 0.4), "moe_z_loss_coeff": 0.1}


@dataclass(frozen=True)
class Layout:
    world: int
    tp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None

    @property
    def dp(self) -> int:
        return self.world // (self.tp * self.cp)


@dataclass(frozen=True)
class Situation:
    """What a config says of experts, and what the tokens are like."""

    changes: dict[str, Any] = field(default_factory=dict)
    tokens: str = "random"


LAYOUTS = {
    "tp2-ep2-etp2": Layout(4, tp=2, ep=2, etp=2),
    "cp2-ep2": Layout(4, cp=2, ep=2),
    "tp2-cp2-ep4-etp2": Layout(8, tp=2, cp=2, ep=4, etp=2),
    "tp1-ep2-etp2": Layout(4, tp=1, ep=2, etp=2),
    "tp2-etp1": Layout(2, tp=2, etp=1),
}
SITUATIONS = {
    "plain": Situation(),
    "top-1": Situation({"moe_router_topk": 1, "moe_router_pre_softmax": True}),
    "top-3": Situation({"moe_router_topk": 3, "moe_router_topk_scaling_factor": 2.5}),
    "sigmoid-groups": Situation(
        {
            "moe_router_score_function": "sigmoid",
            "moe_router_num_groups": 2,
            "moe_router_group_topk": 1,
            "moe_router_enable_expert_bias": True,
        }
    ),
    "sqrtsoftplus": Situation({"moe_router_score_function": "sqrtsoftplus"}),
    "sqrtsoftplus-bias": Situation(
        {"moe_router_score_function": "sqrtsoftplus", "moe_router_enable_expert_bias": True}
    ),
    "capacity-probs": Situation({"moe_expert_capacity_factor": 0.6}),
    "capacity-position": Situation(
        {"moe_expert_capacity_factor": 0.5, "moe_token_drop_policy": "position"}
    ),
    "capacity-padded": Situation(
        {
            "moe_expert_capacity_factor": 0.8,
            "moe_pad_expert_input_to_capacity": True,
            "add_bias_linear": True,
        }
    ),
    "capacity-0": Situation({"moe_expert_capacity_factor": 0.0}),
    "all-to-one": Situation({"moe_router_topk": 1, "moe_router_pre_softmax": True}, "one"),
    "ties": Situation({}, "zero"),
    "few": Situation({}, "few"),
    "probs-on-input": Situation(
        {
            "moe_router_topk": 1,
            "moe_router_pre_softmax": True,
            "moe_apply_probs_on_input": True,
        }
    ),
    "biases": Situation({"add_bias_linear": True, "moe_router_topk": 3}),
    "gpt-oss": Situation(
        {
            "add_bias_linear": True,
            "activation_func": quick_gelu,
            "activation_func_clamp_value": 0.5,
            "glu_linear_offset": 1.0,
            "recompute_granularity": "selective",
            "recompute_modules": ("moe_act",),
        }
    ),
    "shared": Situation(
        {
            "moe_shared_expert_intermediate_size": 6,
            "moe_shared_expert_gate": True,
            "moe_shared_expert_overlap": True,
        }
    ),
    "latent": Situation(
        {
            "moe_latent_size": 4,
            "moe_shared_expert_intermediate_size": 6,
            "moe_shared_expert_gate": True,
        }
    ),
    "latent-biases": Situation({"moe_latent_size": 12, "add_bias_linear": True}),
    "per-token": Situation({"calculate_per_token_loss": True}),
}


MEGATRON_NAMES = {
    "grouped": ModuleSpec(
        TEGroupedMLP,
        submodules=MLPSubmodules(TEColumnParallelGroupedLinear, TERowParallelGroupedLinear),
    ),
    "sequential": ModuleSpec(
        SequentialMLP, submodules=MLPSubmodules(ColumnParallelLinear, RowParallelLinear)
    ),
}


def config_of(situation: Situation, **more: Any) -> Any:
    base = {
        "num_layers": 1,
        "hidden_size": HIDDEN,
        "num_attention_heads": 2,
        "ffn_hidden_size": 12,
        "num_moe_experts": EXPERTS,
        "moe_token_dispatcher_type": "alltoall",
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "init_method_std": 0.5,
        "params_dtype": torch.float64,
    }
    return tiny_config(**{**base, **COEFFICIENTS, **situation.changes, **more})


def tokens_of(rule: str, replica: int) -> tuple[Tensor, Tensor]:
    """Hidden states [S, B, h] of a micro-batch, and what the result is multiplied with."""
    generator = torch.Generator().manual_seed(100 + replica)
    shape = (4, 1) if rule == "few" else (SEQUENCE, BATCH)  # for 8 ranks
    x = torch.randn(*shape, HIDDEN, generator=generator, dtype=torch.float64)
    if rule == "zero":  # all experts have the same score
        x = torch.zeros_like(x)
    elif rule == "one":  # every token is like the first
        x = x[:1, :1].expand_as(x).contiguous()
    return x, torch.randn(x.shape, generator=generator, dtype=torch.float64)


def build(config: Any, groups: Any, names: str = "global") -> MoELayer:
    spec = get_gpt_layer_local_spec(config.num_moe_experts, config=config).submodules.mlp
    if names != "global":
        spec.submodules.experts = MEGATRON_NAMES[names]
    layer = build_module(spec, config=config, offered={"pg_collection": groups, "layer_number": 1})
    name_parameters(layer)
    initialize_parameters(layer, 1234)
    for param in layer.parameters():
        info = info_of(param)
        if (name := info.name).endswith("bias"):  # zero at first
            generator = torch.Generator().manual_seed(crc32(name.encode()))
            values = torch.randn(info.global_shape, generator=generator, dtype=torch.float64)
            for (first,), view in info.pieces(param.detach()):
                view.copy_(values[first : first + len(view)])
    if layer.router.expert_bias is not None:
        layer.router.expert_bias.copy_(torch.linspace(-0.1, 0.1, EXPERTS))
    return layer


def whole(pieces: Any, shape: tuple[int, ...]) -> Tensor:
    out = torch.zeros(shape, dtype=torch.float64)
    for offset, part in pieces:
        out[tuple(slice(o, o + n) for o, n in zip(offset, part.shape, strict=True))] += part
    return out


def on_ranks(
    rank: int,
    size: int,
    layout: Layout,
    situations: list[str],
    dispatcher: str,
    names: str = "global",
) -> Any:
    dense, expert = make_grids(size, tp=layout.tp, cp=layout.cp, ep=layout.ep, expt_tp=layout.etp)
    groups = create_process_groups(dense, expert)
    return {name: one(layout, SITUATIONS[name], dispatcher, groups, names) for name in situations}


def one(
    layout: Layout, situation: Situation, dispatcher: str, groups: Any, names: str = "global"
) -> Any:
    config = config_of(
        situation,
        moe_token_dispatcher_type="flex" if dispatcher == "deep_ep" else dispatcher,
        moe_enable_deepep=dispatcher == "deep_ep",
        tensor_model_parallel_size=layout.tp,
        sequence_parallel=layout.tp > 1,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp or layout.tp,
        **({"moe_shared_expert_overlap": False} if dispatcher == "allgather" else {}),
    )
    layer = build(config, groups, names)
    x, r = tokens_of(situation.tokens, groups.dp.rank())
    mine = held_tokens((len(x),), groups.cp.rank(), layout.cp)
    mine = mine.chunk(layout.tp)[groups.tp.rank()]
    x = x[mine].clone().requires_grad_()
    if config.moe_pad_expert_input_to_capacity:
        layer.experts.register_forward_pre_hook(needs_equal_counts)
    y, _ = layer(x)
    (y * r[mine]).sum().backward()
    grads = {}
    for param in layer.parameters():
        info = info_of(param)
        name = info.name
        assert param.grad is not None, name
        replicas = groups.expt_dp if info.is_expert else groups.dp_cp
        dist.all_reduce(param.grad, group=replicas if is_divided(name) else groups.tp_dp_cp)
        if replicas.rank() == 0 or not is_divided(name):
            grads[name] = list(info.pieces(param.grad))
    values = {k: v.clone() for k, v in layer.router.aux_losses.take().items()}
    return {
        "replica": groups.dp.rank(),
        "mine": mine,
        "y": y.detach(),
        "dx": x.grad,
        "grads": grads,
        "local names": sorted(n for n, _ in layer.experts.named_parameters()),
        "aux": values,
    }


def is_divided(name: str) -> bool:
    return not name.startswith(("router", "shared_experts.gate", "fc1_latent", "fc2_latent"))


def needs_equal_counts(experts: Any, inputs: Any) -> None:
    rows, counts, _ = inputs
    assert len(set(counts)) == 1
    assert counts[0] * len(counts) == len(rows)


def expected(situation: Situation, replicas: int) -> Any:
    config = config_of(situation)
    layer = build(config, one_process_groups())
    weights = {n: p.detach().clone().requires_grad_() for n, p in layer.named_parameters()}
    chosen: list[Tensor] = []
    bias = layer.router.expert_bias
    results = []
    for replica in range(replicas):
        hidden, r = tokens_of(situation.tokens, replica)
        x = hidden.clone().requires_grad_()
        flat = x.flatten(0, 1)
        logits = F.linear(flat, weights["router.weight"], weights.get("router.bias"))
        table = plain.weights_table(logits, config, bias)
        if config.moe_expert_capacity_factor is not None:
            table = table * plain.kept(table.detach(), config)
        y = plain.experts(flat, table, weights, config).view_as(x)
        if config.moe_shared_expert_intermediate_size:
            y = y + plain.shared(flat, weights).view_as(x)
        aux = plain.aux_losses(logits, config, x.shape[1], chosen)
        factor = len(flat) if config.calculate_per_token_loss else 1
        extra = sum(
            c * aux[n]
            for n, c in zip(
                (*map(loss_name, BALANCE), "z_loss"),
                (0.3, 0.2, 0.4, 0.1),
                strict=True,
            )
        )
        ((y * r).sum() + factor * extra).backward()
        results.append((y.detach(), x.grad, {k: v.detach() for k, v in aux.items()}))
    return results, {n: w.grad for n, w in weights.items()}


CASES = [
    ("tp2-ep2-etp2", "allgather"),
    ("tp2-ep2-etp2", "alltoall"),
    ("tp2-ep2-etp2", "flex"),
    ("tp2-etp1", "alltoall"),
    ("cp2-ep2", "flex"),
    ("tp1-ep2-etp2", "allgather"),
    ("tp2-cp2-ep4-etp2", "alltoall"),
]
DEFAULT = [
    ("tp2-ep2-etp2", "alltoall"),
    ("tp2-etp1", "alltoall"),
    ("cp2-ep2", "flex"),
    ("tp1-ep2-etp2", "allgather"),
]  # of `make test`


@pytest.mark.feature("Mixture of experts: every layout and dispatcher computes what one rank does")
@pytest.mark.parametrize(("name", "dispatcher"), selection.only(DEFAULT, CASES))
def test_experts_on_many_ranks_compute_what_a_plain_layer_computes(name, dispatcher):
    layout = LAYOUTS[name]
    needs_the_plain_answer(
        run_ranks(on_ranks, layout.world, layout, list(SITUATIONS), dispatcher), layout
    )


@pytest.mark.feature("Mixture of experts: Megatron Core's parameter names for all local experts")
@pytest.mark.parametrize("names", ["grouped", "sequential"])
def test_experts_with_megatron_names_compute_what_a_plain_layer_computes(names):
    """Values, gradients and initial weights, which follow from the names in checkpoints."""
    layout, cases = LAYOUTS["tp2-ep2-etp2"], ["plain", "biases", "gpt-oss"]
    found = run_ranks(on_ranks, layout.world, layout, cases, "alltoall", names)
    needs_the_plain_answer(found, layout)
    if names == "grouped":
        local = [f"linear_fc{m}.weight{n}" for m in (1, 2) for n in (0, 1)]
    else:
        local = [f"local_experts.{n}.linear_fc{m}.weight" for n in (0, 1) for m in (1, 2)]
    assert all(rank["plain"]["local names"] == local for rank in found)


def needs_the_plain_answer(found: list[Any], layout: Layout) -> None:
    for case in found[0]:
        situation = SITUATIONS[case]
        results, grads = expected(situation, layout.dp)
        ranks = [rank[case] for rank in found]
        for rank in ranks:
            y, dx, _ = results[rank["replica"]]
            torch.testing.assert_close(rank["y"], y[rank["mine"]], rtol=1e-11, atol=1e-12)
            torch.testing.assert_close(rank["dx"], dx[rank["mine"]], rtol=1e-11, atol=1e-12)
        for replica, (_, _, aux) in enumerate(results):
            for key, value in aux.items():
                total = sum(r["aux"][key] for r in ranks if r["replica"] == replica)
                torch.testing.assert_close(total, value, msg=f"{case} {key}")
        for key, value in grads.items():
            if not is_divided(key):
                for rank in ranks:
                    got = whole(rank["grads"][key], value.shape)
                    torch.testing.assert_close(got, value, rtol=1e-10, atol=1e-11)
            else:
                held = [r["grads"][key] for r in ranks if key in r["grads"]]
                if key.endswith("fc2.bias"):  # whole on every rank of expt_tp
                    assert len(held) == (layout.etp or layout.tp)
                else:
                    held = [[piece for pieces in held for piece in pieces]]
                for pieces in held:
                    got = whole(pieces, value.shape)
                    torch.testing.assert_close(got, value, rtol=1e-10, atol=1e-11)


def nan_on_rank_1(rank: int, size: int) -> str:
    groups = create_process_groups(*make_grids(size))
    layer = build(config_of(Situation({"moe_token_dispatcher_type": "alltoall"})), groups)
    hidden = tokens_of("random", rank)[0]
    if rank == 1:
        hidden[3, 1, 0] = torch.nan
    try:
        with naming_step(7):
            layer.router.gating(hidden)
    except NonFiniteError as error:
        return str(error)
    return ""


@pytest.mark.feature("Mixture of experts: NaN in a router names step, rank and layer")
def test_nan_logits_are_named() -> None:
    found = run_ranks(nan_on_rank_1, 2)
    named = "step 7: rank 1: the router of layer 1 computes NaN for a token: its input or its "
    assert found == ["", f"{named}weight is not finite"]


def rerun_of_nan_on_rank_1(rank: int, size: int) -> list[bool]:
    """Whether the outputs of two passes are finite; the first one has NaN on rank 1."""
    groups = create_process_groups(*make_grids(size, ep=size))
    layer = build(config_of(Situation({"moe_token_dispatcher_type": "alltoall"})), groups)
    initialize_rerun_state_machine(mode=RerunMode.VALIDATE_RESULTS)
    machine = get_rerun_state_machine()
    finite = []
    while machine.should_run_forward_backward(None):
        hidden = tokens_of("random", rank)[0]
        if rank == 1 and not finite:
            hidden[3, 1, 0] = torch.nan
        output = layer(hidden)[0]
        output.sum().backward()
        finite.append(bool(output.isfinite().all()))
    assert machine.should_checkpoint_and_exit() == (False, False, 0)
    return finite


def test_a_step_with_nan_in_a_router_runs_again_on_all_ranks() -> None:
    first, second = run_ranks(rerun_of_nan_on_rank_1, 2)
    assert first[1], "the second pass of rank 0"
    assert second == [False, True]


def order_of_events(rank: int, size: int) -> list[str]:
    groups = create_process_groups(*make_grids(size, ep=size))
    situation = SITUATIONS["shared"]
    layer = build(config_of(situation, moe_token_dispatcher_type="alltoall"), groups)
    seen: list[str] = []
    start, wait = token_dispatcher._Flight.start, token_dispatcher._Flight.wait

    def started(self: Any, rows: Tensor) -> Tensor:
        seen.append("start")
        return start(self, rows)

    def waited(self: Any) -> Tensor:
        seen.append("wait")
        return wait(self)

    layer.shared_experts.register_forward_hook(lambda *_: seen.append("shared"))
    layer.shared_experts.linear_fc1.weight.register_hook(lambda _: seen.append("shared, backward"))
    x = tokens_of("random", rank)[0].requires_grad_()
    with (
        mock.patch.object(token_dispatcher._Flight, "start", started),
        mock.patch.object(token_dispatcher._Flight, "wait", waited),
    ):
        layer(x)[0].sum().backward()
    return seen


@pytest.mark.feature("Mixture of experts: shared experts are computed while tokens travel")
def test_shared_experts_are_computed_while_tokens_travel() -> None:
    weights = results = ["start", "wait"]
    forward = [*weights, "start", "shared", "wait", *results]
    backward = [*results, "start", "shared, backward", "wait", *weights]
    assert run_ranks(order_of_events, 2) == [forward + backward] * 2


def gradients_of_a_retained_graph(rank: int, size: int) -> list[list[float]]:
    sending, receiving = ([1, 2], [1, 3]) if rank == 0 else ([3, 1], [2, 1])
    rows = torch.arange(float(sum(sending)), requires_grad=True)
    flight = token_dispatcher._Flight(sending, receiving, dist.group.WORLD)
    (received,) = token_dispatcher._AllToAll.apply([flight], rows)
    loss = (received * (1 + rank)).sum()
    return [torch.autograd.grad(loss, rows, retain_graph=True)[0].tolist() for _ in range(3)]


def test_a_retained_graph_sends_gradients_back_each_time() -> None:
    first, second = run_ranks(gradients_of_a_retained_graph, 2)
    assert first == [[1, 2, 2]] * 3
    assert second == [[1, 1, 1, 2]] * 3


def waits_for_the_device(rank: int, size: int, dispatcher: str) -> int:
    groups = create_process_groups(*make_grids(size, ep=2, expt_tp=2))
    layer = build(config_of(Situation(), moe_token_dispatcher_type=dispatcher), groups)
    hidden = tokens_of("random", rank)[0]
    routing = layer.router(hidden)
    tolist = mock.Mock(side_effect=Tensor.tolist)
    with mock.patch.object(Tensor, "tolist", lambda x: tolist(x)):
        layer.token_dispatcher.dispatch(hidden.flatten(0, 1), routing)
    return tolist.call_count


@pytest.mark.parametrize("dispatcher", ["alltoall", "flex"])
def test_a_dispatch_waits_for_the_device_once(dispatcher: str) -> None:
    assert run_ranks(waits_for_the_device, 4, dispatcher) == [1] * 4


def experts_of_packed_tokens(rank: int, size: int, changes: dict[str, Any]) -> dict[int, list[int]]:
    """Return the experts of this rank's tokens, by the place of the token in the packed row."""
    lengths = (8, 4, 12)
    torch.manual_seed(5)
    row = torch.randn(sum(lengths), 1, 16)
    ends = torch.tensor((0, *lengths)).cumsum(0).int()
    config = tiny_config(
        hidden_size=16,
        num_moe_experts=4,
        add_bias_linear=False,
        context_parallel_size=size,
        **changes,
    )
    router = TopKRouter(config, pg_collection=create_process_groups(*make_grids(size, cp=size)))
    router.weight.data = torch.ones_like(router.weight)  # all experts are equal: the order decides
    packed = PackedSeqParams.of_bounds(PackedBounds(ends, max(lengths)))
    held = held_tokens(lengths, rank, size)
    more = {"packed_seq_params": packed} if router.depends_on_order else {}
    found = router(row[held], **more).experts
    return dict(zip(held.tolist(), found.tolist(), strict=True))


@pytest.mark.parametrize(
    "changes",
    [
        {"moe_expert_capacity_factor": 0.5, "moe_token_drop_policy": "position"},
        {"moe_expert_capacity_factor": 0.5},
        {"moe_router_force_load_balancing": True, "moe_router_topk": 1},
    ],
    ids=["position", "probs", "forced"],
)
def test_experts_of_packed_tokens_do_not_depend_on_context_parallelism(
    changes: dict[str, Any],
) -> None:
    """Each packed sequence is sharded on its own: its tokens keep their place in the row."""
    (alone,) = run_ranks(experts_of_packed_tokens, 1, changes)
    first, second = run_ranks(experts_of_packed_tokens, 2, changes)
    assert first | second == alone
