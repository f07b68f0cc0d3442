"""Megatron Core's functions of expert layers; they call the functions of `transformer.moe`.

``n`` tokens, ``E`` experts; probs and routing_map [n, E] are the pair that a router returns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core import device
from megatron.core.autograd import Context, Function
from megatron.core.aux_loss import AuxLosses
from megatron.core.config.errors import MissingDependency
from megatron.core.parallel.default_groups import default_groups, library_call
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe import routing
from megatron.core.transformer.moe.routing import RoutingRule

# -- choice of experts -------------------------------------------------------------------------


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
    rule = RoutingRule(
        k=topk,
        score_function=score_function,
        pre_softmax=use_pre_softmax,
        num_groups=num_groups if num_groups and group_topk else 1,
        groups_per_token=group_topk or 1,
        scaling_factor=scaling_factor or None,
    )
    route = routing.route_fused if fused else routing.route
    probs, routing_map = route(logits, rule, expert_bias)
    return probs, routing_map


def group_limited_topk(
    scores: Tensor, topk: int, num_tokens: int, num_experts: int, num_groups: int, group_topk: int
) -> tuple[Tensor, Tensor]:
    """Return scores and numbers [n, k] of the best experts within each token's best groups."""
    rule = RoutingRule(k=topk, num_groups=num_groups, groups_per_token=group_topk)
    experts = routing.best(routing.within_best_groups(scores.detach(), rule), topk)
    return scores.gather(1, experts), experts


def compute_routing_scores_for_aux_loss(
    logits: Tensor, topk: int, score_function: str, fused: bool = False
) -> tuple[Tensor, Tensor]:
    """Return routing_map and scores, which sum to 1, for a balance loss.  ``fused``: no effect."""
    scores = routing.balance_scores(logits, RoutingRule(k=topk, score_function=score_function))
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
    visits = routing_probs.detach().masked_fill(~routing_map, -torch.inf)
    kept = routing.fits(visits, capacity, drop_policy, fills=pad_to_capacity)
    return routing_probs * kept, kept


def apply_random_logits(logits: Tensor) -> Tensor:
    """Return random values whose gradient goes to ``logits``, to benchmark with balanced load."""
    return logits + (torch.randn_like(logits) - logits).detach()


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
    token = routing_map.bool().t().nonzero()[:, 1]
    if drop_and_pad and num_out_tokens is not None:
        order = routing_map.byte().argsort(dim=0, descending=True, stable=True)
        token = order[: num_out_tokens // routing_map.shape[1]].t().flatten()
    expert = _experts_of_rows(len(token), routing_map, drop_and_pad)
    weights = None if probs is None else probs[token, expert]
    return tokens.index_select(0, token), weights, token


def _experts_of_rows(num_rows: int, routing_map: Tensor, drop_and_pad: bool) -> Tensor:
    if not drop_and_pad:
        return routing_map.bool().t().nonzero()[:, 0]
    experts = torch.arange(routing_map.shape[1], device=routing_map.device)
    return experts.repeat_interleave(num_rows // len(experts))


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
        expert = _experts_of_rows(len(rows), routing_map, drop_and_pad)
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
    sizes = split_sizes.tolist()
    order = sorted_idxs.tolist()

    def sort(rows: Tensor) -> Tensor:
        chunks = rows.split(sizes)
        return torch.cat([chunks[i] for i in order])

    return sort(input), None if probs is None else sort(probs)


# -- auxiliary losses, and losses of multi-token prediction ------------------------------------


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


def _add(
    entry: dict[str, Any],
    loss: Tensor,
    place: int,
    size: int,
    groups: tuple[ProcessGroup | None, ProcessGroup | None],
) -> None:
    """Add a loss to ``values`` [size] of an entry, whose groups sum and average them later."""
    values = entry.setdefault("values", torch.zeros(size, device=loss.device))
    values[place] += loss.detach()
    entry["reduce_group"], entry["avg_group"] = groups


def _reduce(
    entry: dict[str, Any], sums: Sequence[ProcessGroup] = (), means: Sequence[ProcessGroup] = ()
) -> None:
    """Sum and average the values of an entry over its groups and these.  Collective."""
    values = entry["values"]
    for groups, averages in (
        ((*sums, entry.get("reduce_group")), False),
        ((*means, entry.get("avg_group")), True),
    ):
        for group in groups:
            if group is not None and group.size() > 1:
                dist.all_reduce(values, group=group)
                values /= group.size() if averages else 1


def _log(
    losses: Mapping[str, Any],
    iteration: int,
    writers: tuple[Any, Any],
    totals: dict[str, Tensor] | None = None,
) -> None:
    """Log losses by TensorBoard and wandb, and add them to ``totals``, where these are not None."""
    board, wandb = writers
    for name, value in losses.items():
        if totals is not None:
            totals[name] = totals.get(name, 0) + value
        if board is not None:
            board.add_scalar(name, value, iteration)
        if wandb is not None:
            wandb.log({name: value}, iteration)


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
    if layer_number is not None:
        groups = reduce_group, avg_group
        _add(_tracker.setdefault(name, {}), loss, layer_number - 1, num_layers, groups)


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


@library_call()
def reduce_aux_losses_tracker_across_ranks(
    track_names: Sequence[str] | None = None, *, pg_collection: ProcessGroupCollection
) -> None:
    """Sum losses over pipeline stages, average them over data-parallel ranks.  Collective."""
    tracker = get_moe_layer_wise_logging_tracker()
    for name in tracker if track_names is None else track_names:
        _reduce(tracker[name], [pg_collection.pp], [pg_collection.dp_cp])


@library_call()
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
    *,
    pg_collection: ProcessGroupCollection,
) -> None:
    """Log the auxiliary losses since the last call, averaged over layers of experts.  Collective.

    With ``force_initialize`` all ``track_names`` are reduced, also on stages without experts.
    """
    tracker = get_moe_layer_wise_logging_tracker()
    for name in track_names or () if force_initialize else ():
        empty = torch.zeros(num_layers or 0, device=device.current())
        tracker.setdefault(name, {"values": empty})
    reduce_aux_losses_tracker_across_ranks(track_names, pg_collection=pg_collection)
    if moe_layer_freq is None or isinstance(moe_layer_freq, int):
        count = len(range(0, num_layers or 0, moe_layer_freq or 1))
    elif isinstance(moe_layer_freq, list | tuple):
        count = sum(moe_layer_freq)
    else:
        raise ValueError(f"Invalid moe_layer_freq: {moe_layer_freq}: use a number or a list")
    count += mtp_num_layers or 0
    losses = {name: entry["values"].float() * loss_scale for name, entry in tracker.items()}
    means = {name: values.sum() / count for name, values in losses.items()}
    _log(means, iteration, (writer, wandb_writer), total_loss_dict)
    for name, values in losses.items() if per_layer_logging else ():
        layers = {f"moe/{name}_layer_{i}": value for i, value in enumerate(values.tolist())}
        _log(layers, iteration, (writer, wandb_writer))
    clear_aux_losses_tracker()


class MTPLossLoggingHelper:
    """Collects the losses of multi-token prediction for the log.

    ``tracker``: "values" [depths] and the groups over which they are reduced.
    """

    tracker: dict[str, Any] = {}  # noqa: RUF012  (projects assign to its items)

    @staticmethod
    def save_loss_to_tracker(
        loss: Tensor,
        layer_number: int | None,
        num_layers: int,
        reduce_group: ProcessGroup | None = None,
        avg_group: ProcessGroup | None = None,
    ) -> None:
        """Add the loss of depth ``layer_number``, from 0."""
        if layer_number is not None:
            groups = reduce_group, avg_group
            _add(MTPLossLoggingHelper.tracker, loss, layer_number, num_layers, groups)

    @staticmethod
    def clean_loss_in_tracker() -> None:
        """Set all losses to 0."""
        MTPLossLoggingHelper.tracker["values"].zero_()
        MTPLossLoggingHelper.tracker |= {"reduce_group": None, "avg_group": None}

    @staticmethod
    def reduce_loss_in_tracker() -> None:
        """Sum over ``reduce_group``, average over ``avg_group``.  Collective over both."""
        if "values" in MTPLossLoggingHelper.tracker:
            _reduce(MTPLossLoggingHelper.tracker)

    @staticmethod
    def track_mtp_metrics(
        loss_scale: float,
        iteration: int,
        writer: Any,
        wandb_writer: Any = None,
        total_loss_dict: dict[str, Tensor] | None = None,
    ) -> None:
        """Log the losses since the last call, also from `GPTModel`, times ``loss_scale``."""
        tracker = MTPLossLoggingHelper.tracker
        for losses in [*AuxLosses.instances]:
            if any(name.startswith("mtp_") for name in losses.values):
                found = losses.take()
                groups = tracker.get("reduce_group"), default_groups().dp_cp
                for depth, (total, count) in enumerate(found.values()):
                    _add(tracker, total / count / loss_scale, depth, len(found), groups)
        MTPLossLoggingHelper.reduce_loss_in_tracker()
        if "values" not in tracker:
            return
        depths = enumerate(tracker["values"] * loss_scale, start=1)
        scaled = {f"mtp_{depth} loss": loss for depth, loss in depths}
        _log(scaled, iteration, (writer, wandb_writer), total_loss_dict)
        MTPLossLoggingHelper.clean_loss_in_tracker()


# -- experts in the layout of the package grouped_gemm -----------------------------------------


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
