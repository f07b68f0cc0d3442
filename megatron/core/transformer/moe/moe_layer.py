"""Mixture-of-experts layer: route tokens, dispatch them to experts, compute, combine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron.core import device
from megatron.core.config.errors import ConfigError
from megatron.core.parallel.default_groups import library_call
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ReplicatedLinear
from megatron.core.tensor_parallel.random import checkpoint
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.deep_ep import DeepEPDispatcher, unsupported_reason
from megatron.core.transformer.moe.experts import Experts
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.routing import RoutingResult
from megatron.core.transformer.moe.token_dispatcher import (
    DISPATCHERS,
    DispatchedTokens,
    LocalDispatcher,
    Meanwhile,
    TokenDispatcher,
)
from megatron.core.transformer.spec_utils import Slot, build_module
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass
class MoESubmodules:
    """Submodules of the layer: experts, shared experts, router, projections of a latent MoE.

    ``experts``: the linear layers of an expert, or a class of all experts of a rank.
    """

    experts: MLPSubmodules | Slot | None = None
    shared_experts: Slot | None = None
    router: Slot = TopKRouter
    latent_proj: Slot = ReplicatedLinear


class BaseMoELayer(MegatronModule, ABC):
    """A layer of experts of any kind: which experts this rank has."""

    @library_call("config layer_number model_comm_pgs")
    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int | None = None,
        *,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        super().__init__(config)
        assert config.num_moe_experts is not None, "a layer of experts needs --num-experts"
        self.layer_number = layer_number
        self.ep_group = pg_collection.ep
        self.num_local_experts = config.num_moe_experts // self.ep_group.size()
        first = self.ep_group.rank() * self.num_local_experts
        self.local_expert_indices = [*range(first, first + self.num_local_experts)]
        self.router: Any = None
        self.experts: Any = None
        self.shared_experts: Any = None

    @abstractmethod
    def forward(self, hidden_states: Tensor) -> Any:
        """Compute the layer: [s, b, h] -> ([s, b, h], None)."""

    def set_layer_number(self, layer_number: int) -> None:
        """Set the number of the layer, which counts from 1 over the complete model."""
        self.layer_number = layer_number
        self.router.set_layer_number(layer_number)


class MoELayer(BaseMoELayer):
    """Mixture of experts: each token is computed by --moe-router-topk of --num-experts experts.

    A subclass may override a step of `forward`.
    """

    @library_call("config submodules layer_number model_comm_pgs")
    def __init__(
        self,
        config: TransformerConfig,
        submodules: MoESubmodules,
        layer_number: int | None = None,
        *,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        super().__init__(config, layer_number, pg_collection=pg_collection)
        assert config.num_moe_experts is not None, "checked by the base class"
        self.has_tensor_ranks = pg_collection.tp.size() > 1
        self.router = build_module(
            submodules.router, config=config, offered={"pg_collection": pg_collection}
        )
        if layer_number is not None:
            self.router.set_layer_number(layer_number)
        self.token_dispatcher: TokenDispatcher
        sizes = config.num_moe_experts, pg_collection
        if pg_collection.tp_ep.size() == 1:
            self.token_dispatcher = LocalDispatcher(*sizes)
        elif config.moe_enable_deepep and unsupported_reason(config, device.current()) is None:
            self.token_dispatcher = DeepEPDispatcher(*sizes, config.moe_deepep_num_sms)
        else:
            self.token_dispatcher = DISPATCHERS[config.moe_token_dispatcher_type](*sizes)
        offered = {"pg_collection": pg_collection}
        if isinstance(submodules.experts, MLPSubmodules):
            self.experts = Experts(
                config, submodules.experts, self.local_expert_indices, pg_collection=pg_collection
            )
        else:
            self.experts = build_module(
                submodules.experts, self.num_local_experts, config, offered=offered
            )
        self.fc1_latent_proj: Any = None  # hidden size to --moe-latent-size, on the tokens' ranks
        self.fc2_latent_proj: Any = None
        if config.moe_latent_size is not None:
            widths = config.hidden_size, config.moe_latent_size
            project = partial(
                build_module, submodules.latent_proj, config=config, bias=config.add_bias_linear
            )
            self.fc1_latent_proj = project(*widths, init_method=config.init_method)
            self.fc2_latent_proj = project(
                *reversed(widths), init_method=config.output_layer_init_method
            )
        self.recomputes_shared = "shared_experts" in config.modules_to_recompute
        if config.moe_shared_expert_intermediate_size:
            self.shared_experts = build_module(
                submodules.shared_experts, config=config, offered=offered
            )

    @property
    def depends_on_order(self) -> bool:
        """Whether `forward` needs ``packed_seq_params``, if a row has several sequences."""
        return bool(getattr(self.router, "depends_on_order", False))

    def forward(
        self, hidden_states: Tensor, padding_mask: Tensor | None = None, **more: Any
    ) -> tuple[Tensor, None]:
        """Compute [s, b, h] -> ([s, b, h], None); None stands for the unadded bias of an MLP.

        ``padding_mask`` [b, s]: True for tokens that visit no expert; see `TopKRouter`.  ``more``:
        packed_seq_params, where the layer `depends_on_order`, and expert_routes to replay; see
        `TopKRouter.forward`.  Collective over tp_ep (the dispatcher), and over tp_cp where the
        router counts tokens.  Raises ConfigError in training with tensor parallelism alone, whose
        ranks route the same tokens and count their gradients several times.
        """
        is_replicated = self.has_tensor_ranks and not self.config.sequence_parallel
        if is_replicated and self.training and torch.is_grad_enabled():
            raise ConfigError(
                "experts with tensor parallelism are trained with --sequence-parallel "
                "(sequence_parallel=True) only: add it"
            )
        masks = () if padding_mask is None else (padding_mask,)
        tokens, routing, residual = self.router_and_preprocess(hidden_states, *masks, **more)
        # With overlap the dispatcher computes the shared experts during its all-to-all.
        overlapped: list[Tensor] = []
        if self.shared_experts is not None and self.config.moe_shared_expert_overlap:
            dispatched, weights = self.dispatch(
                tokens, routing, lambda: overlapped.append(self._shared_output(residual))
            )
        else:
            dispatched, weights = self.dispatch(tokens, routing)
        y, shared, _ = self.experts_compute(dispatched, weights, residual, *overlapped)
        return self.combine(y, shared), None

    def router_and_preprocess(
        self, hidden_states: Tensor, padding_mask: Tensor | None = None, **more: Any
    ) -> tuple[Tensor, RoutingResult, Tensor]:
        """Return the tokens to dispatch, their routing, and the input of shared experts.

        The tokens are [n, h], or of a latent MoE [n, --moe-latent-size].
        """
        masks = () if padding_mask is None else (padding_mask,)
        routing = RoutingResult.of(self.router(hidden_states, *masks, **more))
        tokens = hidden_states.flatten(0, 1)
        if self.fc1_latent_proj is not None:
            tokens, _ = self.fc1_latent_proj(tokens)
        return tokens, routing, hidden_states

    def dispatch(
        self, hidden_states: Tensor, probs: RoutingResult, meanwhile: Meanwhile | None = None
    ) -> tuple[DispatchedTokens, Tensor]:
        """Send tokens to the ranks of their experts; return those that arrive, and their weights.

        ``meanwhile``: see `TokenDispatcher.dispatch`.
        """
        arrived = self.token_dispatcher.dispatch(hidden_states, probs, meanwhile)
        if self.config.moe_pad_expert_input_to_capacity and probs.capacity is not None:
            arrived = arrived.padded(probs.capacity * self.token_dispatcher.num_micro_batches)
        elif not (
            isinstance(self.experts, Experts) and self.experts.takes_tail(hidden_states.device)
        ):
            arrived = arrived.without_tail()
        return arrived, arrived.weights

    def experts_compute(
        self,
        hidden_states: DispatchedTokens,
        probs: Tensor,
        residual: Tensor,
        overlapped: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, None]:
        """Compute the experts, and the shared ones unless they are ``overlapped``: [s, b, h] each.

        The results are back on the ranks of their tokens.
        """
        rows = hidden_states.rows
        if self.config.moe_apply_probs_on_input:
            rows = rows * probs.unsqueeze(-1).to(rows.dtype)
            probs = torch.ones_like(probs)
        y, _ = self.experts(rows, hidden_states.counts, probs)
        y = hidden_states.back(y)
        if self.fc2_latent_proj is not None:
            y, _ = self.fc2_latent_proj(y)
        y = y.view_as(residual)
        if self.shared_experts is not None and overlapped is None:
            overlapped = self._shared_output(residual)
        return y, overlapped, None

    def _shared_output(self, hidden_states: Tensor) -> Tensor:
        if self.recomputes_shared and self.training:
            output: Tensor = checkpoint(self.shared_experts, False, hidden_states)
        else:
            output = self.shared_experts(hidden_states)
        return output

    def combine(self, output: Tensor, shared_expert_output: Tensor | None) -> Tensor:
        """Add the output of the shared experts."""
        return output if shared_expert_output is None else output + shared_expert_output
