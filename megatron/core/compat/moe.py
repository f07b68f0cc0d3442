"""Megatron Core's functions of expert layers; they call the functions of `transformer.moe`.

``n`` tokens, ``E`` experts; probs and routing_map [n, E] are the pair that a router returns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core import device
from megatron.core.autograd import Context, Function
from megatron.core.aux_loss import AuxLosses
from megatron.core.config.errors import MissingDependency
from megatron.core.parallel.default_groups import default_groups
from megatron.core.tensor_parallel.mappings import through
from megatron.core.transformer.moe import deep_ep, routing
from megatron.core.transformer.moe.routing import RoutingRule

# -- choice of experts -------------------------------------------------------------------------


def _rule(
    topk: int,
    score_function: str,
    groups: tuple[int | None, int | None] = (None, None),
    **more: Any,
) -> RoutingRule:
    if score_function not in ("softmax", "sigmoid"):
        raise ValueError(f"Invalid score_function: {score_function}: use softmax or sigmoid")
    num_groups, chosen = groups
    if num_groups and chosen:
        more |= {"num_groups": num_groups, "groups_per_token": chosen}
        more["scores_per_group"] = topk // chosen
    return RoutingRule(k=topk, score_function=score_function, **more)


def topk_routing_with_score_function(
    logits: Tensor,
    topk: int,
    use_pre_softmax: bool = False,
    num_groups: int | None = None,
    group_topk: int | None = None,
    scaling_factor: float | None = None,
    score_function: str = "softmax",
    expert_bias: Tensor | None = None,
    fused: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return probs and routing_map of logits [n, E]; ``fused`` uses a kernel where there is one."""
    assert logits.dim() == 2, f"logits are [tokens, experts], not {tuple(logits.shape)}"
    groups = num_groups, group_topk
    how = {"pre_softmax": use_pre_softmax, "scaling_factor": scaling_factor or None}
    rule = _rule(topk, score_function, groups, **how)
    route = routing.route_fused if fused else routing.route
    probs, routing_map = route(logits, rule, expert_bias)
    return probs, routing_map


def group_limited_topk(
    scores: Tensor, topk: int, num_tokens: int, num_experts: int, num_groups: int, group_topk: int
) -> tuple[Tensor, Tensor]:
    """Return scores and numbers [n, k] of the best experts within each token's best groups."""
    rule = _rule(topk, "softmax", (num_groups, group_topk))
    experts = routing.best(routing.within_best_groups(scores.detach(), rule), topk)
    return scores.gather(1, experts), experts


def compute_routing_scores_for_aux_loss(
    logits: Tensor, topk: int, score_function: str, fused: bool = False
) -> tuple[Tensor, Tensor]:
    """Return routing_map and scores, which sum to 1, for a balance loss.  ``fused``: no effect."""
    scores = routing.balance_scores(logits, _rule(topk, score_function))
    experts = routing.best(scores.detach(), topk)
    return torch.zeros_like(scores, dtype=torch.bool).scatter(1, experts, True), scores


def get_capacity(
    num_tokens: int, num_experts: int, capacity_factor: float, min_capacity: int | None = None
) -> int:
    """Return the maximum number of tokens of an expert."""
    capacity = math.ceil(num_tokens / num_experts * capacity_factor)
    return max(capacity, min_capacity or 0)


def apply_router_token_dropping(
    routing_probs: Tensor,
    routing_map: Tensor,
    router_topk: int,
    capacity_factor: float,
    drop_policy: str = "probs",
    pad_to_capacity: bool = False,
) -> tuple[Tensor, Tensor]:
    """Drop visits beyond each expert's capacity; with padding every expert has that many visits."""
    if drop_policy not in ("probs", "position"):
        raise ValueError(f"Invalid drop_policy: {drop_policy}: use probs or position")
    num_tokens, num_experts = routing_map.shape
    capacity = get_capacity(num_tokens * router_topk, num_experts, capacity_factor)
    ranks = routing_probs.detach() if drop_policy == "probs" else routing_map.to(torch.int8)
    order = torch.sort(ranks, dim=0, descending=True, stable=True).indices[:capacity]
    kept = torch.zeros_like(routing_map, dtype=torch.bool).scatter(0, order, True)
    kept = kept if pad_to_capacity else kept & routing_map
    return routing_probs * kept, kept


@cache
def _generator(where: torch.device) -> torch.Generator:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return torch.Generator(where).manual_seed(42 + rank)


def apply_random_logits(logits: Tensor) -> Tensor:
    """Return random values whose gradient goes to ``logits``, to benchmark with balanced load."""
    noise = torch.empty_like(logits).normal_(generator=_generator(logits.device))
    return logits + (noise - logits).detach()


class RouterGatingLinearFunction(Function[Tensor]):
    """Router logits in ``router_dtype``, of which no converted input or weight is saved."""

    @staticmethod
    def forward(
        ctx: Context[torch.dtype], inp: Tensor, weight: Tensor, router_dtype: torch.dtype
    ) -> Tensor:
        """Multiply [.., h] by the transpose of [E, h] -> [.., E]."""
        ctx.save_for_backward(inp, weight)
        ctx.values = router_dtype
        return inp.to(router_dtype) @ weight.to(router_dtype).t()

    @staticmethod
    def backward(ctx: Context[torch.dtype], grad_output: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return the gradients of input and weight in their dtypes."""
        inp, weight = ctx.saved_tensors
        d_inp = grad_output @ weight.to(ctx.values)
        d_weight = grad_output.flatten(0, -2).t() @ inp.to(ctx.values).flatten(0, -2)
        return d_inp.to(inp.dtype), d_weight.to(weight.dtype), None


# -- rows of experts ---------------------------------------------------------------------------


def permute(
    tokens: Tensor,
    routing_map: Tensor,
    probs: Tensor | None = None,
    num_out_tokens: int | None = None,
    fused: bool = False,
    drop_and_pad: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return rows sorted by expert, their probs, and each row's token: [m, h], [m], [m].

    With ``drop_and_pad`` every expert has ``num_out_tokens`` / E rows.  ``fused``: no effect.
    """
    chosen = routing_map.bool().t()
    if drop_and_pad and num_out_tokens is not None:
        capacity = num_out_tokens // len(chosen)
        order = chosen.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
        token = order[:, :capacity].flatten()
        expert = torch.arange(len(chosen), device=token.device).repeat_interleave(capacity)
    else:
        expert, token = chosen.nonzero(as_tuple=True)
    weights = None if probs is None else probs[token, expert]
    return tokens.index_select(0, token), weights, token


def unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    restore_shape: Sequence[int],
    probs: Tensor | None = None,
    routing_map: Tensor | None = None,
    fused: bool = False,
    drop_and_pad: bool = False,
) -> Tensor:
    """Sum the rows of each token, weighted by ``probs`` if given; the reverse of `permute`."""
    rows = permuted_tokens
    if probs is not None:
        assert routing_map is not None, "probs need the routing_map"
        expert = routing_map.bool().t().nonzero()[:, 0]
        if drop_and_pad:
            num_experts = routing_map.shape[1]
            expert = torch.arange(num_experts, device=rows.device)
            expert = expert.repeat_interleave(len(rows) // num_experts)
        rows = rows * probs[sorted_indices, expert].unsqueeze(-1)
    whole = rows.new_zeros(tuple(restore_shape)).index_add(0, sorted_indices, rows)
    return whole.to(permuted_tokens.dtype)


def sort_chunks_by_idxs(
    input: Tensor,
    split_sizes: Tensor,
    sorted_idxs: Tensor,
    probs: Tensor | None = None,
    fused: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Split rows, and their ``probs``, and join the chunks in the order of ``sorted_idxs``."""
    sizes, order = split_sizes.tolist(), sorted_idxs.tolist()
    both = [
        None if rows is None else torch.cat([rows.split(sizes)[i] for i in order])
        for rows in (input, probs)
    ]
    assert both[0] is not None, "there are rows"
    return both[0], both[1]


# -- auxiliary losses --------------------------------------------------------------------------


def switch_load_balancing_loss_func(
    probs: Tensor,
    tokens_per_expert: Tensor,
    total_num_tokens: int,
    topk: int,
    num_experts: int,
    moe_aux_loss_coeff: float,
    fused: bool = False,
) -> Tensor:
    """Return this rank's summand of a balance loss, which is the coefficient for equal load."""
    share = num_experts * moe_aux_loss_coeff / (topk * total_num_tokens * total_num_tokens)
    return (probs.sum(0) * tokens_per_expert).sum() * share


def z_loss_func(logits: Tensor, z_loss_coeff: float) -> Tensor:
    """Return the z-loss of logits [n, E], times its coefficient."""
    return routing.z_loss(logits, num_tokens=logits[..., 0].numel()) * z_loss_coeff


class MoEAuxLossAutoScaler(Function[Tensor]):
    """Returns ``output``; backward adds the gradient of ``aux_loss``, times the scale."""

    main_loss_backward_scale: Any = None

    @staticmethod
    def forward(ctx: Context[None], output: Tensor, aux_loss: Tensor) -> Tensor:
        """Attach ``aux_loss`` to ``output``."""
        ctx.save_for_backward(aux_loss)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Context[None], grad_output: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of both."""
        (aux_loss,) = ctx.saved_tensors
        scale = MoEAuxLossAutoScaler.main_loss_backward_scale
        return grad_output, torch.ones_like(aux_loss) * (1.0 if scale is None else scale)

    @staticmethod
    def set_loss_scale(scale: Tensor) -> None:
        """Set the scale of the main loss, also for layers that no schedule runs."""
        MoEAuxLossAutoScaler.main_loss_backward_scale = scale
        AuxLosses.weight = scale


_tracker: dict[str, dict[str, Any]] = {}


def save_to_aux_losses_tracker(
    name: str,
    loss: Tensor,
    layer_number: int | None,
    num_layers: int,
    reduce_group: ProcessGroup | None = None,
    avg_group: ProcessGroup | None = None,
) -> None:
    """Add a loss of a layer to the log; ranks of ``reduce_group`` hold summands."""
    if layer_number is None:
        return
    entry = _tracker.setdefault(name, {"values": torch.zeros(num_layers, device=loss.device)})
    entry["values"][layer_number - 1] += loss.detach()
    entry |= {"reduce_group": reduce_group, "avg_group": avg_group}


def get_moe_layer_wise_logging_tracker() -> dict[str, dict[str, Any]]:
    """Return name -> ``values`` [layers], with the losses of all routers since the last call."""
    for losses in [*AuxLosses.instances]:
        if losses.num_layers:
            for name, value in losses.take().items():
                where = losses.layer_index + 1, losses.num_layers, losses.group
                save_to_aux_losses_tracker(name, value, *where)
    return _tracker


def clear_aux_losses_tracker() -> None:
    """Set all values of the log to 0."""
    for entry in get_moe_layer_wise_logging_tracker().values():
        entry["values"].zero_()


def reduce_aux_losses_tracker_across_ranks(track_names: Sequence[str] | None = None) -> None:
    """Sum losses over pipeline stages, average them over data-parallel ranks.  Collective."""
    groups, tracker = default_groups(), get_moe_layer_wise_logging_tracker()
    for name in tracker if track_names is None else track_names:
        entry = tracker[name]
        averages = entry.get("avg_group"), groups.dp_cp
        for group in (groups.pp, entry.get("reduce_group"), *averages):
            if group is not None and group.size() > 1:
                dist.all_reduce(entry["values"], group=group)
                if group in averages:
                    entry["values"] /= group.size()


def track_moe_metrics(
    loss_scale: float,
    iteration: int,
    writer: Any,
    wandb_writer: Any = None,
    total_loss_dict: dict[str, Tensor] | None = None,
    per_layer_logging: bool = False,
    force_initialize: bool = False,
    track_names: Sequence[str] | None = None,
    num_layers: int | None = None,
    moe_layer_freq: int | Sequence[int] | None = None,
    mtp_num_layers: int | None = None,
) -> None:
    """Log the auxiliary losses since the last call, averaged over layers of experts.  Collective.

    With ``force_initialize`` all ``track_names`` are reduced, also on stages without experts.
    """
    tracker = get_moe_layer_wise_logging_tracker()
    for name in track_names or () if force_initialize else ():
        empty = torch.zeros(num_layers or 0, device=device.current())
        tracker.setdefault(name, {"values": empty})
    reduce_aux_losses_tracker_across_ranks(track_names)
    if moe_layer_freq is None or isinstance(moe_layer_freq, int):
        count = len(range(0, num_layers or 0, moe_layer_freq or 1))
    elif isinstance(moe_layer_freq, list | tuple):
        count = sum(moe_layer_freq)
    else:
        raise ValueError(f"Invalid moe_layer_freq: {moe_layer_freq}: use a number or a list")
    count += mtp_num_layers or 0
    scalars: dict[str, Any] = {}
    for name, entry in tracker.items():
        values = entry["values"].float() * loss_scale
        scalars[name] = mean = values.sum() / count
        if total_loss_dict is not None:
            total_loss_dict[name] = total_loss_dict.get(name, 0) + mean
        if per_layer_logging:
            scalars |= {f"moe/{name}_layer_{i}": v for i, v in enumerate(values.tolist())}
    if writer is not None:
        for name, value in scalars.items():
            writer.add_scalar(name, value, iteration)
            if wandb_writer:
                wandb_writer.log({name: value}, iteration)
    clear_aux_losses_tracker()


# -- DeepEP, and experts in the layout of the package grouped_gemm -----------------------------


def get_hidden_bytes(x: Tensor) -> int:
    """Return the bytes of a row that DeepEP's buffer must hold, at least 2 per value."""
    return x.shape[1] * max(x.element_size(), 2)


def fused_combine(
    x: Tensor,
    group: ProcessGroup,
    handle: Any,
    async_finish: bool = False,
    allocate_on_comm_stream: bool = False,
) -> tuple[Tensor, None]:
    """Send results back to their tokens by DeepEP, and wait for them.  Collective."""
    handled = deep_ep.get_buffer(group, get_hidden_bytes(x)), handle
    return through(x, handled, deep_ep.combined, deep_ep.dispatched), None


class GroupedMLP(torch.nn.Module):
    """Experts whose weights are two tensors: not available."""

    def __init__(self, num_local_experts: int, config: Any, model_comm_pgs: Any = None) -> None:
        raise MissingDependency(
            "GroupedMLP needs the layout of the package grouped_gemm, which is not supported: use "
            "TEGroupedMLP (moe_grouped_gemm=True), which needs no package"
        )


def grouped_gemm_is_available() -> bool:
    """Return whether the package grouped_gemm is used: never."""
    return False


def assert_grouped_gemm_is_available() -> None:
    """Raise AssertionError: the package is not used."""
    raise AssertionError("grouped_gemm is not supported: use TEGroupedMLP, which needs no package")


ops = None
