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

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron.core import device
from megatron.core.aux_loss import AuxLosses
from megatron.core.config.errors import NonFiniteError
from megatron.core.parallel.context_parallel_partition import held_tokens
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.params.param_init import new_parameter, param_info_for
from megatron.core.rerun.state_machine import get_rerun_state_machine
from megatron.core.tensor_parallel.linear import Multiply
from megatron.core.tensor_parallel.mappings import all_gather_first_dim
from megatron.core.tensor_parallel.random import fork_for_tokens
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe import routing as arithmetic
from megatron.core.transformer.moe.routing import RoutingResult, RoutingRule
from megatron.core.transformer.transformer_config import TransformerConfig

_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


class TopKRouter(MegatronModule):
    """Chooses ``--moe-router-topk`` experts for each token."""

    multiply: Multiply = staticmethod(F.linear)  # generation may set another one on an instance

    def __init__(
        self, config: TransformerConfig, layer_number: int, *, pg_collection: ProcessGroupCollection
    ) -> None:
        super().__init__(config)
        assert config.num_moe_experts is not None, "a router needs --num-experts"
        self.layer_number, self.groups = layer_number, pg_collection
        self.num_experts = config.num_moe_experts
        self.is_sequence_sharded = config.sequence_parallel and pg_collection.tp.size() > 1
        groups_per_token = config.moe_router_group_topk or 1
        self.rule = RoutingRule(
            k=config.moe_router_topk,
            score_function=config.moe_router_score_function,
            pre_softmax=config.moe_router_pre_softmax,
            num_groups=config.moe_router_num_groups or 1,
            groups_per_token=groups_per_token,
            scores_per_group=config.moe_router_group_score_topk
            or config.moe_router_topk // groups_per_token,
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
        self.aux_losses = AuxLosses(layer_number - 1)
        self.expert_bias: Tensor | None
        self.tokens_per_expert: Tensor | None  # of the step so far, on this rank
        for name, is_saved in (("expert_bias", True), ("tokens_per_expert", False)):
            zeros: Tensor | None = None
            if config.moe_router_enable_expert_bias:
                zeros = torch.zeros(self.num_experts, dtype=torch.float32, device=device.current())
            self.register_buffer(name, zeros, persistent=is_saved)

    @property
    def sharers(self) -> ProcessGroup:
        """The ranks over which the tokens of a micro-batch are sharded."""
        return self.groups.tp_cp if self.is_sequence_sharded else self.groups.cp

    def forward(self, hidden: Tensor, padding_mask: Tensor | None = None) -> RoutingResult:
        """Route the s*b tokens of this rank, hidden states [s, b, h].

        ``padding_mask`` [b, s] is True for padding, which visits no expert and is not counted by
        capacity, Sinkhorn and auxiliary losses.  Collective as described at the top of this file.
        """
        jittered = hidden
        eps = self.config.moe_input_jitter_eps
        if eps and self.training:
            with fork_for_tokens(True, is_sequence_sharded=self.is_sequence_sharded):
                jittered = hidden * torch.empty_like(hidden).uniform_(1 - eps, 1 + eps)
        logits, marker = self._without_nan(self.logits(jittered).flatten(0, 1))
        padding: Tensor | None = None
        num_tokens: int | Tensor = len(logits) * self.sharers.size()  # of all ranks
        if padding_mask is not None:
            padding = padding_mask.transpose(0, 1).flatten()
            num_tokens = self._without_empty((~padding).sum(), logits)
        if self.config.moe_z_loss_coeff is not None and self.training:
            loss = arithmetic.z_loss(logits, num_tokens=num_tokens, padding=padding)
            factor = self.config.moe_z_loss_coeff * self._loss_weight(num_tokens)
            logits = self.aux_losses.attach(logits, "z_loss", loss, factor)
        if self.config.moe_router_load_balancing_type == ("sinkhorn",):
            routing = self._sinkhorn(logits, hidden, padding)
        elif self.config.moe_router_force_load_balancing:  # round-robin, whatever the scores
            first = self._places(hidden)[self.sharers.rank()] * self.rule.k + self.layer_number
            visits = torch.arange(self.rule.k, device=first.device)
            experts = (first.unsqueeze(1) + visits) % self.num_experts
            weights = arithmetic.weights_of(logits, experts, self.rule)
            routing = RoutingResult(experts, weights, self.num_experts)
        else:
            route = arithmetic.route_fused if self.config.moe_router_fusion else arithmetic.route
            routing = route(logits, self.rule, self.expert_bias)
        if padding is not None:
            routing = arithmetic.keeping(routing, ~padding.unsqueeze(1))
        if self.training:
            routing = self._with_balance_losses(routing, logits, hidden, padding, num_tokens)
        if self.config.moe_expert_capacity_factor is not None:
            routing = self._within_capacity(routing, hidden, num_tokens)
        if self.tokens_per_expert is not None and self.training and torch.is_grad_enabled():
            self.tokens_per_expert += routing.counts()
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

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute router logits: [.., h] -> [.., E].

        Outside of a step that can run again, raises NonFiniteError on NaN; on a GPU a device-side
        assertion fails instead.
        """
        dtype = self.dtype or hidden.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        logits = self.multiply(hidden.to(dtype), self.weight.to(dtype), bias)
        if self.can_rerun:
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

    def _places(self, hidden: Tensor) -> Tensor:
        """Return the index of each rank's tokens in the order of a single rank: [sharers, s*b]."""
        s, b = hidden.shape[:2]
        cp, device_ = self.groups.cp.size(), hidden.device
        tp = self.sharers.size() // cp
        rows = [held_tokens((s * tp * cp,), i, cp, device_).view(tp, s) for i in range(cp)]
        columns = torch.arange(b, device=device_)
        return (torch.cat(rows).unsqueeze(-1) * b + columns).flatten(1)

    def _of_all_tokens(
        self, x: Tensor, hidden: Tensor, decide: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Apply ``decide`` [N, ..] -> [N, ..] to the tokens of all ranks; return this rank's rows.

        Every rank computes the same decision from the all-gathered ``x``, in the token order of a
        single rank, so that ties are broken alike.  No gradient passes.  Collective.
        """
        if self.sharers.size() == 1:
            return decide(x)
        places = self._places(hidden)
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
        self, routing: RoutingResult, hidden: Tensor, num_tokens: int | Tensor
    ) -> RoutingResult:
        """Drop visits beyond the capacity; with padding the host waits for the number of tokens."""
        factor = self.config.moe_expert_capacity_factor
        assert factor is not None
        # ceil(factor * n * k / E) tokens per expert
        capacity = -int(-int(num_tokens) * self.rule.k * factor // self.num_experts)
        policy = self.config.moe_token_drop_policy
        kept = self._of_all_tokens(
            arithmetic.dense_visits(routing),
            hidden,
            lambda visits: arithmetic.fits(visits, capacity, policy),
        )
        is_kept = F.pad(kept, (0, 1)).gather(1, routing.experts)
        return replace(arithmetic.keeping(routing, is_kept), capacity=capacity)

    def _sinkhorn(self, logits: Tensor, hidden: Tensor, padding: Tensor | None) -> RoutingResult:
        """Choose experts by Sinkhorn's balanced assignment of all tokens; weigh by plain scores."""
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
        experts = self._of_all_tokens(marked, hidden, assign)
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

    def _with_balance_losses(
        self,
        routing: RoutingResult,
        logits: Tensor,
        hidden: Tensor,
        padding: Tensor | None,
        num_tokens: int | Tensor,
    ) -> RoutingResult:
        """Attach the balance losses to the weights.

        ``scores`` are of this rank's tokens, counts of all: the results of all ranks add up to a
        loss, which is 1 for equal load.
        """
        terms = balance_terms(self.config)
        if not terms:
            return routing
        k = self.rule.k
        weights = routing.weights
        scores = arithmetic.balance_scores(logits, self.rule)
        plain = arithmetic.best(scores.detach(), k)
        if padding is not None:
            scores = scores.masked_fill(padding.unsqueeze(1), 0.0)
        for kind, coefficient in terms:
            if kind == "seq_aux_loss":
                loss = self._sequence_balance_loss(scores, plain, hidden, padding)
            else:
                counts = arithmetic.tally(plain, self.num_experts, padding)
                counts = self._sum_over_sharers(counts)
                if kind == "global_aux_loss":
                    counts = self._mean_so_far(counts)
                # E times the sum over experts of (fraction of visits) times (mean score)
                share = counts.to(scores.dtype) / (k * num_tokens)
                loss = self.num_experts * (scores.sum(0) * share).sum() / num_tokens
            factor = coefficient * self._loss_weight(num_tokens)
            weights = self.aux_losses.attach(weights, loss_name(kind), loss, factor)
        return replace(routing, weights=weights)

    def _sequence_balance_loss(
        self, scores: Tensor, experts: Tensor, hidden: Tensor, padding: Tensor | None
    ) -> Tensor:
        """Return the mean of the balance losses of each sequence.  Collective over the sharers."""
        s, b = hidden.shape[:2]
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


def loss_name(kind: str) -> str:
    """Return the name of a balance loss in the log."""
    return kind.replace("aux", "load_balancing")


def balance_terms(config: TransformerConfig) -> list[tuple[str, float]]:
    """Return (kind, coefficient) of the balance losses whose coefficient is not 0."""
    kinds, coefficients = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
    return [
        (kind, coefficient)
        for kind, coefficient in zip(kinds, coefficients, strict=True)
        if kind.endswith("aux_loss") and coefficient
    ]


@torch.no_grad()
def update_expert_biases(
    models: Sequence[nn.Module], groups: ProcessGroupCollection, rate: float
) -> None:
    """Raise the bias of experts with less than the mean load by ``rate``, lower that of the others.

    Balances load without an auxiliary loss (arXiv 2408.15664).  The load is the number of tokens of
    the global batch; the counts start again at 0.  Call it once per step.  Collective over
    tp_dp_cp.
    """
    routers = [m for model in models for m in model.modules() if isinstance(m, TopKRouter)]
    counts = [r.tokens_per_expert for r in routers if r.tokens_per_expert is not None]
    if not counts:
        return
    total = torch.stack(counts)
    if groups.tp_dp_cp.size() > 1:
        dist.all_reduce(total, group=groups.tp_dp_cp)
    steps = torch.sign(total.mean(-1, keepdim=True) - total) * rate
    for router, step in zip(routers, steps, strict=True):
        assert router.expert_bias is not None, "it comes with the counts"
        assert router.tokens_per_expert is not None, "it comes with the bias"
        router.expert_bias += step
        router.tokens_per_expert.zero_()
