"""Shared experts: one MLP that processes every token, sharded like the MLP of a dense layer."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.parallel.default_groups import library_call
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.params.param_init import new_parameter, param_info_for
from megatron.core.tensor_parallel.linear import Multiply
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig


class SharedExpertMLP(MLP):
    """MLP of the shared experts; --moe-shared-expert-gate adds a learned sigmoid gate per token."""

    # Generation may set others on an instance.
    multiply: Multiply = staticmethod(F.linear)
    sigmoid: Callable[[Tensor], Tensor] = staticmethod(torch.sigmoid)

    @library_call("config submodules gate model_comm_pgs")
    def __init__(
        self,
        config: TransformerConfig,
        submodules: MLPSubmodules,
        gate: bool = False,
        *,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        """Create the layers.  There is a gate if ``gate`` or the config asks for it."""
        tp_group = pg_collection.tp
        super().__init__(
            config,
            submodules,
            tp_group=tp_group,
            ffn_hidden_size=config.moe_shared_expert_intermediate_size,
        )
        self.gate_weight: torch.nn.Parameter | None = None
        if gate or config.moe_shared_expert_gate:
            is_sequence_sharded = config.sequence_parallel and tp_group.size() > 1
            info = param_info_for(
                (1, config.hidden_size), config.init_method, sequence_parallel=is_sequence_sharded
            )
            self.gate_weight = new_parameter(info.global_shape, config.params_dtype, info)

    def forward(self, hidden_states: Tensor) -> Tensor:  # type: ignore[override]
        """Compute [s, b, h] -> [s, b, h], bias included.  Collective over ``tp_group``."""
        y, bias = super().forward(hidden_states)
        y = y if bias is None else y + bias
        if self.gate_weight is None:
            return y
        return y * self.sigmoid(self.multiply(hidden_states, self.gate_weight, None))
