"""The router of a mixture-of-experts layer: logits, top-k choice, load-balancing losses.

The tokens of a micro-batch are sharded over the ranks of tp_cp (sequence and context parallelism).
Capacity, Sinkhorn and balance losses depend on all of these tokens, so they use collectives; choice
and losses are then the same as on one rank.

Collectives of a forward pass over tp_cp, each only if configured, in this order: all-gather of
logits (Sinkhorn); for each balance loss an all-reduce of counts, for global_aux_loss also an
all-gather of counts over dp; all-gather of weights (capacity).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial, partialmethod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron.core import device
from megatron.core.aux_loss import AuxLosses
from megatron.core.config.errors import NonFiniteError
from megatron.core.device import cpu_kernels
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel.context_parallel_partition import held_tokens, row_lengths
from megatron.core.parallel.default_groups import library_call
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.params.param_init import new_parameter, param_info_for
from megatron.core.rerun.state_machine import get_rerun_state_machine
from megatron.core.tensor_parallel.linear import Multiply
from megatron.core.tensor_parallel.mappings import all_gather_first_dim
from megatron.core.tensor_parallel.random import fork_for_tokens
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe import routing as arithmetic
from megatron.core.transformer.moe.router_replay import RouterReplay
from megatron.core.transformer.moe.routing import RoutingResult, RoutingRule
from megatron.core.transformer.transformer_config import TransformerConfig

_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


class TokenShape(NamedTuple):
    """Rows of s tokens of this rank, b of them; ``lengths`` of sequences packed into a row."""

    s: int
    b: int
    lengths: tuple[int, ...] | None = None


class TopKRouter(MegatronModule):
    """Chooses ``--moe-router-topk`` experts for each token.

    A subclass may override `gating` and `routing`, which may also return Megatron Core's pair; see
    `RoutingResult`.
    """

    multiply: Multiply = staticmethod(F.linear)  # generation may set another one on an instance

    @library_call("config model_comm_pgs")
    def __init__(self, config: TransformerConfig, *, pg_collection: ProcessGroupCollection) -> None:
        super().__init__(config)
        assert config.num_moe_experts is not None, "a router needs --num-experts"
        self.groups = pg_collection
        self.num_experts = config.num_moe_experts
        self.is_sequence_sharded = config.sequence_parallel and pg_collection.tp.size() > 1
        self.rule = RoutingRule(
            k=config.moe_router_topk,
            score_function=config.moe_router_score_function,
            pre_softmax=config.moe_router_pre_softmax,
            num_groups=config.moe_router_num_groups or 1,
            groups_per_token=config.moe_router_group_topk or 1,
            scores_per_group=config.moe_router_group_score_topk or 0,
            scaling_factor=config.moe_router_topk_scaling_factor,
        )
        shape = self.num_experts, config.hidden_size
        info = param_info_for(shape, config.init_method, sequence_parallel=self.is_sequence_sharded)
        self.weight = new_parameter(info.global_shape, config.params_dtype, info)
        self.bias: torch.nn.Parameter | None = None
        if config.add_bias_linear:
            info = replace(info, global_shape=(self.num_experts,), init="zeros")
            self.bias = new_parameter(info.global_shape, config.params_dtype, info)
        self.dtype = _DTYPES.get(config.moe_router_dtype or "")
        self.topk = self.rule.k
        self.score_function = self.rule.score_function
        kinds = config.load_balancing_types
        self.routing_type = kinds[0] if len(kinds) == 1 else [*kinds]
        self.router_replay = RouterReplay() if config.moe_enable_routing_replay else None
        self.set_layer_number(1)
        self.enable_expert_bias = config.moe_router_enable_expert_bias
        self.expert_bias: Tensor | None
        self.local_tokens_per_expert: Tensor | None  # of the step so far, on this rank
        for name, is_saved in (("expert_bias", True), ("local_tokens_per_expert", False)):
            zeros: Tensor | None = None
            if self.enable_expert_bias:
                zeros = torch.zeros(self.num_experts, dtype=torch.float32, device=device.current())
            self.register_buffer(name, zeros, persistent=is_saved)

    @staticmethod
    def end_batch(models: Sequence[nn.Module], groups: ProcessGroupCollection) -> None:
        """Update the biases of experts; `finalize_model_grads` calls it once a step."""
        update_expert_biases(models, groups)

    def set_layer_number(self, layer_number: int) -> None:
        """Set the number of the layer, which counts from 1 over the complete model."""
        self.layer_number = layer_number
        num_layers = self.config.num_layers + self.config.num_layers_ahead
        self.aux_losses = AuxLosses(layer_number - 1, num_layers, self.sharers)

    @property
    def sharers(self) -> ProcessGroup:
        """The ranks over which the tokens of a micro-batch are sharded."""
        return self.groups.tp_cp if self.is_sequence_sharded else self.groups.cp

    @property
    def depends_on_order(self) -> bool:
        """Whether routing depends on which tokens of packed sequences this rank holds."""
        c = self.config
        has_limits = (
            c.moe_expert_capacity_factor is not None or "sinkhorn" in c.load_balancing_types
        )
        return self.groups.cp.size() > 1 and (has_limits or c.moe_router_force_load_balancing)

    def forward(
        self, input: Tensor, padding_mask: Tensor | None = None, **more: Any
    ) -> RoutingResult:
        """Route the s*b tokens of this rank, hidden states [s, b, h].

        ``padding_mask`` [b, s] is True for padding, which visits no expert and is not counted by
        capacity, Sinkhorn and auxiliary losses.  ``more``: packed_seq_params, if routing
        `depends_on_order`; expert_routes [b, s, k] to replay, see `RouterReplay.choose`.
        Collective as described at the top of this file.
        """
        masks = () if padding_mask is None else (padding_mask,)
        return self.routing(self.gating(self.apply_input_jitter(input)), *masks, **more)

    def apply_input_jitter(self, input: Tensor) -> Tensor:
        """Multiply the values of the router's input by random factors, as the config asks."""
        eps = self.config.moe_input_jitter_eps
        if not eps or not self.training:
            return input
        with fork_for_tokens(True, is_sequence_sharded=self.is_sequence_sharded):
            return input * torch.empty_like(input).uniform_(1 - eps, 1 + eps)

    def routing(
        self,
        logits: Tensor,
        padding_mask: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        expert_routes: Tensor | None = None,
        experts: Tensor | None = None,
    ) -> RoutingResult:
        """Choose experts and attach the auxiliary losses: logits [s, b, E]; see `forward`.

        ``experts`` [s b, k]: the experts of each token, if they do not depend on scores.
        """
        lengths = None if packed_seq_params is None else packed_seq_params.lengths
        shape = TokenShape(logits.shape[0], logits.shape[1], lengths)
        logits, marker = self._without_nan(logits.flatten(0, 1))
        padding: Tensor | None = None
        num_tokens: int | Tensor = len(logits) * self.sharers.size()  # of all ranks
        if padding_mask is not None:
            padding = padding_mask.transpose(0, 1).flatten()
            num_tokens = self._without_empty((~padding).sum(), logits)
        logits = self.apply_z_loss(logits, num_tokens, padding)
        if self.config.moe_router_force_load_balancing:  # round-robin, whatever the scores
            places = self._places(shape, logits.device)[self.sharers.rank()]
            first = places * self.rule.k + self.layer_number
            visits = torch.arange(self.rule.k, device=first.device)
            experts = (first.unsqueeze(1) + visits) % self.num_experts
        if experts is not None:
            weights = arithmetic.weights_of(logits, experts, self.rule)
            routing = RoutingResult(experts, weights, self.num_experts)
        elif self.config.load_balancing_types == ("sinkhorn",):
            routing = self.sinkhorn_load_balancing(logits, shape, padding)
        elif self.router_replay is not None:
            given = None if expert_routes is None else expert_routes.transpose(0, 1).flatten(0, 1)
            chooses = partial(self.router_replay.choose, given=given)
            routing = arithmetic.route(logits, self.rule, self.expert_bias, chooses)
        else:
            route = arithmetic.route_fused if self.config.moe_router_fusion else arithmetic.route
            routing = route(logits, self.rule, self.expert_bias)
        if padding is not None:
            routing = arithmetic.keeping(routing, ~padding.unsqueeze(1))
        if self.training and self.is_aux_loss_enabled():
            scores = arithmetic.balance_scores(logits, self.rule)
            plain = arithmetic.best(scores.detach(), self.rule.k)
            weights = self._with_balance_losses(
                routing.weights, scores, plain, shape, padding, num_tokens
            )
            routing = replace(routing, weights=weights)
        if self.config.moe_expert_capacity_factor is not None:
            routing = self._within_capacity(routing, shape, num_tokens)
        self._apply_expert_bias(routing)
        return routing if marker is None else replace(routing, weights=routing.weights * marker)

    def _without_nan(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return ``logits`` without NaN, and a factor of the weights that is NaN if there was one.

        A step that the rerun state machine can reject goes on with valid choices, so that no other
        rank waits for this one, and its loss is NaN.
        """
        if not self.can_rerun:
            return logits, None
        is_nan = logits.detach().isnan()
        is_bad = is_nan.any()
        if not device.is_cuda(logits.device):  # reading the value costs nothing
            message = f"the router of layer {self.layer_number} computes NaN for a token"
            get_rerun_state_machine().validate_result(bool(is_bad), bool, message)
            if not is_bad:
                return logits, None
        marker = logits.new_ones(()).masked_fill(is_bad, torch.nan)
        return logits.masked_fill(is_nan, 0.0), marker

    @property
    def can_rerun(self) -> bool:
        """Whether this is a pass of a step that can be computed again."""
        return self.training and get_rerun_state_machine().is_running

    def gating(self, input: Tensor) -> Tensor:
        """Compute router logits: [.., h] -> [.., E].

        Outside of a step that can run again, raises NonFiniteError on NaN; on a GPU a device-side
        assertion fails instead.
        """
        dtype = self.dtype or input.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        logits = self.multiply(input.to(dtype), self.weight.to(dtype), bias)
        if self.can_rerun or cpu_kernels.is_recording():  # a recorded pass reads no values
            return logits
        is_sound = ~logits.isnan().any()
        rank = self.groups.world.rank()
        message = f"rank {rank}: the router of layer {self.layer_number} computes NaN for a token"
        if device.is_cuda(logits.device):
            torch._assert_async(is_sound, message)
        elif not is_sound:
            raise NonFiniteError(f"{message}: its input or its weight is not finite")
        return logits

    # -- decisions that depend on the tokens of other ranks ----------------------------------

    def _places(self, shape: TokenShape, where: torch.device) -> Tensor:
        """Return the index of each rank's tokens in the order of a single rank: [sharers, s*b]."""
        s, b, packed = shape
        cp = self.groups.cp.size()
        tp = self.sharers.size() // cp
        lengths = row_lengths(packed, s * tp * cp)
        rows = [held_tokens(lengths, i, cp, where).view(tp, s) for i in range(cp)]
        columns = torch.arange(b, device=where)
        return (torch.cat(rows).unsqueeze(-1) * b + columns).flatten(1)

    def _of_all_tokens(
        self, x: Tensor, shape: TokenShape, decide: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Apply ``decide`` [N, ..] -> [N, ..] to the tokens of all ranks; return this rank's rows.

        Every rank computes the same decision from the all-gathered ``x``, in the token order of a
        single rank, so that ties are broken alike.  No gradient passes.  Collective.
        """
        if self.sharers.size() == 1:
            return decide(x)
        places = self._places(shape, x.device)
        everything = torch.empty((places.numel(), *x.shape[1:]), dtype=x.dtype, device=x.device)
        everything[places.flatten()] = all_gather_first_dim(x.detach(), self.sharers)
        return decide(everything)[places[self.sharers.rank()]]

    def _sum_over_sharers(self, counts: Tensor) -> Tensor:
        if self.sharers.size() > 1:
            dist.all_reduce(counts, group=self.sharers)
        return counts

    def _without_empty(self, counts: Tensor, like: Tensor) -> Tensor:
        """Return the sums over all ranks, at least 1, in the dtype of losses."""
        dtype = torch.promote_types(like.dtype, torch.float32)
        return self._sum_over_sharers(counts).clamp(min=1).to(dtype)

    def _within_capacity(
        self, routing: RoutingResult, shape: TokenShape, num_tokens: int | Tensor
    ) -> RoutingResult:
        """Drop visits beyond the capacity; with padding the host waits for the number of tokens."""
        factor = self.config.moe_expert_capacity_factor
        assert factor is not None
        # ceil(factor * n * k / E) tokens per expert
        capacity = -int(-int(num_tokens) * self.rule.k * factor // self.num_experts)
        policy = self.config.moe_token_drop_policy
        kept = self._of_all_tokens(
            arithmetic.dense_visits(routing),
            shape,
            lambda visits: arithmetic.fits(visits, capacity, policy),
        )
        is_kept = F.pad(kept, (0, 1)).gather(1, routing.experts)
        return replace(arithmetic.keeping(routing, is_kept), capacity=capacity)

    def sinkhorn_load_balancing(
        self, logits: Tensor, shape: TokenShape | None = None, padding: Tensor | None = None
    ) -> RoutingResult:
        """Choose experts by Sinkhorn's balanced assignment of all tokens; weigh by plain scores.

        ``shape``: that of the tokens, for the order of ties.
        """
        k = self.rule.k
        marks = logits.new_zeros(len(logits)) if padding is None else padding.to(logits.dtype)

        def assign(marked: Tensor) -> Tensor:
            if padding is None:  # the host need not wait for the number of tokens
                return arithmetic.best(arithmetic.sinkhorn(marked[:, :-1]), k)
            is_token = marked[:, -1] == 0
            experts = torch.zeros(len(marked), k, dtype=torch.int64, device=marked.device)
            experts[is_token] = arithmetic.best(arithmetic.sinkhorn(marked[is_token, :-1]), k)
            return experts

        marked = torch.cat([logits, marks.unsqueeze(1)], 1)
        experts = self._of_all_tokens(marked, shape or TokenShape(len(logits), 1), assign)
        scores = torch.sigmoid(logits) if k == 1 else arithmetic.scores_of(logits, RoutingRule(k=k))
        return RoutingResult(experts, scores.gather(1, experts), self.num_experts)

    # -- losses ----------------------------------------------------------------------------

    def _mean_so_far(self, counts: Tensor) -> Tensor:
        """Return the mean counts [E] over the step's micro-batches up to this one.

        A single rank would run the micro-batches that data-parallel ranks run at the same time one
        after another, so this rank's mean includes those of lower dp ranks.  Collective over dp.
        """
        losses, dp = self.aux_losses, self.groups.dp
        if not torch.is_grad_enabled():  # recomputation will run this pass again and count it then
            return counts
        of_replicas = all_gather_first_dim(counts.unsqueeze(0), dp)
        before = torch.zeros_like(counts) if losses.counted is None else losses.counted
        place = dp.rank() + 1
        mean = (before + of_replicas[:place].sum(0)).double() / (losses.num_counted + place)
        losses.counted = before + of_replicas.sum(0)
        losses.num_counted += dp.size()
        return mean

    def _loss_weight(self, num_tokens: int | Tensor) -> int | Tensor:
        """Return the loss factor: with per-token loss, sums over tokens are divided later."""
        return num_tokens if self.config.calculate_per_token_loss else 1

    def apply_z_loss(
        self, logits: Tensor, num_tokens: int | Tensor | None = None, padding: Tensor | None = None
    ) -> Tensor:
        """Attach the z-loss to the logits [n, E]; ``num_tokens``: of all ranks."""
        coefficient = self.config.moe_z_loss_coeff
        if coefficient is None or not self.training:
            return logits
        if num_tokens is None:
            num_tokens = len(logits) * self.sharers.size()
        loss = arithmetic.z_loss(logits, num_tokens=num_tokens, padding=padding)
        factor = coefficient * self._loss_weight(num_tokens)
        return self.aux_losses.attach(logits, "z_loss", loss, factor)

    def get_aux_loss_coeff(self, aux_loss_type: str) -> float:
        """Return the coefficient of a kind of balance loss, 0 without it."""
        return dict(balance_terms(self.config)).get(aux_loss_type, 0.0)

    def is_aux_loss_enabled(self) -> bool:
        """Return whether there is a balance loss."""
        return bool(balance_terms(self.config))

    def _with_balance_losses(
        self,
        weights: Tensor,
        scores: Tensor,
        experts: Tensor,
        shape: TokenShape,
        padding: Tensor | None,
        num_tokens: int | Tensor,
        kinds: Sequence[str] = ("aux_loss", "seq_aux_loss", "global_aux_loss"),
    ) -> Tensor:
        """Attach the balance losses of these ``kinds``, if configured, to ``weights``.  Collective.

        ``scores`` [n, E] are of this rank's tokens, counts of all: the results of all ranks add up
        to a loss, which is 1 for equal load.
        """
        if padding is not None:
            scores = scores.masked_fill(padding.unsqueeze(1), 0.0)
        for kind, coefficient in balance_terms(self.config):
            if kind not in kinds:
                continue
            if kind == "seq_aux_loss":
                loss = self._sequence_balance_loss(scores, experts, shape, padding)
            else:
                counts = arithmetic.tally(experts, self.num_experts, padding)
                counts = self._sum_over_sharers(counts)
                if kind == "global_aux_loss":
                    counts = self._mean_so_far(counts)
                # E times the sum over experts of (fraction of visits) times (mean score)
                share = counts.to(scores.dtype) / (self.rule.k * num_tokens)
                loss = self.num_experts * (scores.sum(0) * share).sum() / num_tokens
            factor = coefficient * self._loss_weight(num_tokens)
            weights = self.aux_losses.attach(weights, loss_name(kind), loss, factor)
        return weights

    def _apply_loss(
        self,
        kind: str,
        probs: Tensor,
        scores_for_aux_loss: Tensor,
        routing_map: Tensor,
        seq_length: int | None = None,
        bsz: int = 1,
    ) -> Tensor:
        """Attach one balance loss, for an override of `routing` with Megatron Core's tensors."""
        n = len(probs)
        plain = arithmetic.best(routing_map.to(probs.dtype), self.topk)
        where = TokenShape(seq_length or n, bsz), None, n * self.sharers.size()
        return self._with_balance_losses(probs, scores_for_aux_loss, plain, *where, (kind,))

    _apply_aux_loss = partialmethod(_apply_loss, "aux_loss")
    _apply_seq_aux_loss = partialmethod(_apply_loss, "seq_aux_loss")
    _apply_global_aux_loss = partialmethod(_apply_loss, "global_aux_loss")

    def _sequence_balance_loss(
        self, scores: Tensor, experts: Tensor, shape: TokenShape, padding: Tensor | None
    ) -> Tensor:
        """Return the mean of the balance losses of each sequence.  Collective over the sharers."""
        s, b, _ = shape
        sequence = torch.arange(b, device=scores.device).repeat(s).unsqueeze(1)
        counts = arithmetic.tally(
            sequence * self.num_experts + experts, b * self.num_experts, padding
        )
        counts = self._sum_over_sharers(counts).view(b, self.num_experts)
        length: int | Tensor = s * self.sharers.size()
        visits: int | Tensor = self.rule.k * length
        if padding is not None:
            length = self._without_empty((~padding).view(s, b).sum(0), scores)
            visits = (self.rule.k * length).unsqueeze(1)
        share = counts.to(scores.dtype) / visits
        return ((scores.view(s, b, -1).sum(0) * share).sum(-1) * (self.num_experts / length)).mean()

    def _apply_expert_bias(
        self, routing_map: RoutingResult | Tensor, padding_mask: Tensor | None = None
    ) -> None:
        """Count the tokens of each expert, for the update of its bias at the end of the step.

        Projects pass routing_map [n, E], and may pass padding_mask [n, 1].
        """
        counts = self.local_tokens_per_expert
        if counts is None or not self.training or not torch.is_grad_enabled():
            return
        if isinstance(routing_map, RoutingResult):
            counts += routing_map.counts()
        else:
            counts += (routing_map if padding_mask is None else routing_map & ~padding_mask).sum(0)

    def _maintain_float32_expert_bias(self) -> None:
        """Convert the expert bias, in which small updates add up, back to float32."""
        if self.expert_bias is not None:
            self.expert_bias.data = self.expert_bias.data.float()


def loss_name(kind: str) -> str:
    """Return the name of a balance loss in the log."""
    return kind.replace("aux", "load_balancing")


def balance_terms(config: TransformerConfig) -> list[tuple[str, float]]:
    """Return (kind, coefficient) of the balance losses whose coefficient is not 0."""
    kinds = config.load_balancing_types
    coefficients = config.aux_loss_coeffs
    return [
        (kind, coefficient)
        for kind, coefficient in zip(kinds, coefficients, strict=True)
        if kind.endswith("aux_loss") and coefficient
    ]


@torch.no_grad()
def update_expert_biases(models: Sequence[nn.Module], groups: ProcessGroupCollection) -> None:
    """Raise the bias of experts with less than the mean load, lower that of the others.

    Balances load without an auxiliary loss (arXiv 2408.15664), by ``moe_router_bias_update_rate``.
    The load is the number of tokens of the global batch; the counts start again at 0.  Frozen
    routers keep their biases.  Call it once per step.  Collective over tp_dp_cp.
    """
    every = [m for model in models for m in model.modules() if isinstance(m, TopKRouter)]
    routers = [router for router in every if router.weight.requires_grad]
    counts = [r.local_tokens_per_expert for r in routers if r.local_tokens_per_expert is not None]
    if not counts:
        return
    total = torch.stack(counts)
    if groups.tp_dp_cp.size() > 1:
        dist.all_reduce(total, group=groups.tp_dp_cp)
    rate = routers[0].config.moe_router_bias_update_rate
    steps = torch.sign(total.mean(-1, keepdim=True) - total) * rate
    for router, step in zip(routers, steps, strict=True):
        assert router.expert_bias is not None, "it comes with the counts"
        assert router.local_tokens_per_expert is not None, "it comes with the bias"
        router.expert_bias += step
        router.local_tokens_per_expert.zero_()
