"""The MLP of a layer: up projection, activation, down projection.

Shapes, with sequence s, batch b, hidden size h, inner width f and tensor-parallel size tp:

    input                    [s, b, h]
    linear_fc1               [s, b, f/tp]      gated MLP: [s, b, 2 f/tp], gate and linear part
    activation               [s, b, f/tp]
    linear_fc2               [s, b, h]

The activation of a gated MLP is act(gate) * (linear + offset); --activation-func-clamp-value clamps
both factors.  With sequence parallelism each rank's input and output have s/tp tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core import device
from megatron.core.activations import openai_gelu
from megatron.core.fusions.bias_glu import activation, adds_bias, glu, weighed
from megatron.core.parallel.default_groups import library_call
from megatron.core.transformer.module import MegatronModule, WithBias
from megatron.core.transformer.norms import leaves_bias_to_sum
from megatron.core.transformer.spec_utils import Slot, build_module
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass
class MLPSubmodules:
    """Submodules of the MLP."""

    linear_fc1: Slot | None = None
    linear_fc2: Slot | None = None


class MLP(MegatronModule):
    """Plain or gated MLP; the inner width is sharded over ``tp_group``."""

    @library_call("config submodules is_expert input_size ffn_hidden_size tp_group")
    def __init__(
        self,
        config: TransformerConfig,
        submodules: MLPSubmodules,
        is_expert: bool = False,
        input_size: int | None = None,
        ffn_hidden_size: int | None = None,
        *,
        tp_group: ProcessGroup,
    ) -> None:
        super().__init__(config)
        self.tp_group = tp_group
        width = (config.moe_latent_size if is_expert else None) or config.hidden_size
        self.input_size = input_size = input_size or width
        ffn_hidden_size = ffn_hidden_size or config.ffn_hidden_size
        # Megatron-LM's fused GELU is the tanh approximation; its checkpoints were trained with it.
        is_tanh_gelu = config.bias_activation_fusion and config.activation_func is F.gelu
        self.activation_func = openai_gelu if is_tanh_gelu else config.activation_func
        blocks = (1, 1) if config.gated_linear_unit else (1,)
        like = torch.empty(0, dtype=config.params_dtype, device=device.current())
        offered = {"tp_group": tp_group, "is_expert": is_expert}
        self.linear_fc1 = build_module(
            submodules.linear_fc1,
            input_size,
            len(blocks) * ffn_hidden_size,
            config=config,
            init_method=config.init_method,
            bias=config.add_bias_linear,
            # The kernel of the activation adds the bias, and sums its gradient.
            skip_bias_add=config.add_bias_linear
            and config.bias_activation_fusion
            and not (config.gated_linear_unit or is_expert)
            and adds_bias(self.activation_func, like),
            offered={**offered, "blocks": blocks},
        )
        self.linear_fc2: Callable[[Tensor], WithBias] = build_module(
            submodules.linear_fc2,
            ffn_hidden_size,
            width,
            config=config,
            init_method=config.output_layer_init_method,
            bias=config.add_bias_linear,
            # The bias of an expert is weighted.
            skip_bias_add=is_expert or leaves_bias_to_sum(config, tp_group, self),
            offered=offered,
        )

    def activate(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        """Apply the activation: [.., f/tp], if gated [.., 2 f/tp], -> [.., f/tp].

        ``weights`` [..]: factor of each row.
        """
        if not self.config.gated_linear_unit:
            y = activation(x, self.activation_func)
            return y if weights is None else weighed(y, weights)
        clamp, offset = self.config.activation_func_clamp_value, self.config.glu_linear_offset
        fused = self.config.bias_swiglu_fusion
        return glu(x, self.activation_func, clamp, offset, weights, fused=fused)

    def forward(self, hidden_states: Tensor, per_token_scale: Tensor | None = None) -> WithBias:
        """Compute [s, b, h] -> [s, b, h], and the output bias still to add (None if none).

        ``per_token_scale`` [s, b] multiplies the inner values.  Collective over ``tp_group``.
        """
        inner, bias = self.linear_fc1(hidden_states)
        if bias is None:
            return self.linear_fc2(self.activate(inner, per_token_scale))
        inner = activation(inner, self.activation_func, bias)
        return self.linear_fc2(
            inner if per_token_scale is None else weighed(inner, per_token_scale)
        )
