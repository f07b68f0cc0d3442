"""Mixture-of-experts layer: route tokens, dispatch them to experts, compute, combine."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core import device
from megatron.core.config.errors import ConfigError
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import checkpoint
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.deep_ep import DeepEPDispatcher, unsupported_reason
from megatron.core.transformer.moe.experts import Experts
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.moe.token_dispatcher import (
    DISPATCHERS,
    LocalDispatcher,
    TokenDispatcher,
)
from megatron.core.transformer.spec_utils import Slot, build_module
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass
class MoESubmodules:
    """Submodules of the layer: the linear layers of an expert, and the shared experts."""

    experts: MLPSubmodules
    shared_experts: Slot | None = None


class MoELayer(MegatronModule):
    """Mixture of experts: each token is computed by --moe-router-topk of --num-experts experts."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MoESubmodules,
        layer_number: int,
        *,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        super().__init__(config)
        assert config.num_moe_experts is not None, "a layer of experts needs --num-experts"
        self.has_tensor_ranks = pg_collection.tp.size() > 1
        self.router = TopKRouter(config, layer_number, pg_collection=pg_collection)
        self.dispatcher: TokenDispatcher
        sizes = config.num_moe_experts, pg_collection
        if pg_collection.tp_ep.size() == 1:
            self.dispatcher = LocalDispatcher(*sizes)
        elif config.moe_enable_deepep and unsupported_reason(config, device.current()) is None:
            self.dispatcher = DeepEPDispatcher(*sizes, config.moe_deepep_num_sms)
        else:
            self.dispatcher = DISPATCHERS[config.moe_token_dispatcher_type](*sizes)
        self.experts = Experts(
            config, submodules.experts, self.dispatcher.local_experts, pg_collection=pg_collection
        )
        self.recomputes_shared = "shared_experts" in config.modules_to_recompute
        self.shared_experts: SharedExpertMLP | None = None
        if config.moe_shared_expert_intermediate_size:
            self.shared_experts = build_module(
                submodules.shared_experts, config=config, offered={"tp_group": pg_collection.tp}
            )

    def forward(self, hidden: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, None]:
        """Compute [s, b, h] -> ([s, b, h], None); None stands for the unadded bias of an MLP.

        ``padding_mask`` [b, s]: True for tokens that visit no expert; see `TopKRouter`.  Collective
        over tp_ep (the dispatcher), and over tp_cp where the router counts tokens.  Raises
        ConfigError in training with tensor parallelism alone, whose ranks route the same tokens
        and count their gradients several times.
        """
        is_replicated = self.has_tensor_ranks and not self.config.sequence_parallel
        if is_replicated and self.training and torch.is_grad_enabled():
            raise ConfigError(
                "experts with tensor parallelism are trained with --sequence-parallel "
                "(sequence_parallel=True) only: add it"
            )
        routing = self.router(hidden) if padding_mask is None else self.router(hidden, padding_mask)
        # Output of the shared experts.  With overlap the dispatcher computes it during its
        # all-to-all, otherwise it is computed after the routed experts.
        shared: list[Tensor] = []

        def compute() -> None:
            mlp = self.shared_experts
            if mlp is not None:
                recomputes = self.recomputes_shared and self.training
                shared.append(checkpoint(mlp, False, hidden) if recomputes else mlp(hidden))

        meanwhile = compute if self.config.moe_shared_expert_overlap else None
        arrived = self.dispatcher.dispatch(hidden.flatten(0, 1), routing, meanwhile)
        if self.config.moe_pad_expert_input_to_capacity and routing.capacity is not None:
            arrived = arrived.padded(routing.capacity * self.dispatcher.num_micro_batches)
        elif not self.experts.takes_tail(hidden.device):
            arrived = arrived.without_tail()
        rows, weights = arrived.rows, arrived.weights
        if self.config.moe_apply_probs_on_input:
            rows = rows * weights.unsqueeze(-1).to(rows.dtype)
            weights = torch.ones_like(weights)
        y = arrived.back(self.experts(rows, weights, arrived.counts)).view_as(hidden)
        if not shared:
            compute()
        return sum(shared, y), None
