"""TransformerConfig, composed of the dataclasses in transformer/config.

Sizes are global, before sharding.  Construction fills in defaults that depend on other fields;
afterwards the config is immutable (``dataclasses.replace`` makes a changed copy).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.params.param_init import Init
from megatron.core.transformer.config.attention import AttentionConfig, MLAConfig
from megatron.core.transformer.config.base import BaseConfig, MLPConfig
from megatron.core.transformer.config.execution import (
    CudaGraphConfig,
    FusionConfig,
    RecomputeConfig,
)
from megatron.core.transformer.config.moe import MoEConfig
from megatron.core.transformer.config.precision import PrecisionConfig


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(
    BaseConfig,
    AttentionConfig,
    MLPConfig,
    MoEConfig,
    MLAConfig,
    PrecisionConfig,
    RecomputeConfig,
    FusionConfig,
    CudaGraphConfig,
    ModelParallelConfig,
):
    """Configuration of a stack of transformer layers."""

    gated_linear_unit: bool = False
    activation_func: Callable[[Tensor], Tensor] = F.gelu
    bias_activation_fusion: bool = False
    params_dtype: torch.dtype = torch.float32
    pipeline_dtype: torch.dtype | None = None
    virtual_pipeline_model_parallel_size: int | None = None
    fp16: bool = False
    bf16: bool = False
    init_seed: int | None = None  # of initial weights; None: torch's seed when a model is built

    @property
    def use_kitchen(self) -> bool:
        """Whether layers come from the kitchen package, whose flags are refused."""
        return self.kitchen_config_file is not None or self.kitchen_recipe_number is not None

    @property
    def init_method(self) -> Init:
        """Initialization of weight matrices."""
        if self.init_method_xavier_uniform:
            return Init("xavier_uniform")
        return Init("normal", self.init_method_std)

    @property
    def output_layer_init_method(self) -> Init:
        """Initialization of output projections, which add to the residual stream."""
        if self.init_method_xavier_uniform:
            return Init("xavier_uniform")
        parts = 1 if self.is_hybrid_model else 2  # sublayers per layer that add to the residual
        return Init("normal", self.init_method_std / math.sqrt(parts * self.num_layers))

    @property
    def embedding_init_method(self) -> Init:
        """Initialization of word embeddings."""
        if self.init_method_xavier_uniform and self.embedding_init_method_std is None:
            return Init("xavier_uniform")
        std = self.embedding_init_method_std
        return Init("normal", self.init_method_std if std is None else std)

    @property
    def why_own_matrices(self) -> str | None:
        """Why linear layers are our own even with --transformer-impl transformer_engine, or None.

        The text begins with the flag that is the reason.
        """
        if self.delay_wgrad_compute:
            return "--delay-wgrad-compute: this program's own layers queue weight gradients"
        if (self.pipeline_schedule or "").startswith("zb"):
            schedule = f"--pipeline-schedule {self.pipeline_schedule}"
            return f"{schedule}: this program's own layers queue weight gradients"
        if not self.is_quantized:
            return None
        if self.stores_codes:
            return "--fp8-param-gather: this program's own layers gather weights in fp8"
        if not self.fp8_wgrad:
            return "--no-fp8-wgrad: this program's own layers save inputs in the higher precision"
        if self.fp4 is None and self.fp8_recipe == "delayed":
            if self.uses_graphs:
                return "--fp8-recipe delayed: a captured graph cannot replay the scales' changes"
            if self.num_moe_experts is not None and self.moe_grouped_gemm:
                return (
                    "--fp8-recipe delayed with --moe-grouped-gemm: this program's own layers keep "
                    "the amax history of each expert"
                )
        return None

    def __post_init__(self) -> None:
        fill = object.__setattr__
        if self.recompute_granularity == "adaptive":  # an old name
            fill(self, "recompute_granularity", "full")
        if self.ffn_hidden_size is None:
            fill(self, "ffn_hidden_size", 4 * self.hidden_size)
        if self.multi_latent_attention:  # head width is the sum of unrotated and rotated channels
            fill(self, "kv_channels", self.qk_head_dim + self.qk_pos_emb_head_dim)
            fill(self, "num_query_groups", self.num_attention_heads)
        if self.kv_channels is None and self.num_attention_heads:
            fill(self, "kv_channels", self.hidden_size // self.num_attention_heads)
        if self.num_query_groups is None:
            fill(self, "num_query_groups", self.num_attention_heads)
        if self.num_moe_experts is not None and self.moe_ffn_hidden_size is None:
            fill(self, "moe_ffn_hidden_size", self.ffn_hidden_size)
        # A script may pass one value in place of a sequence.
        for name in ("moe_router_load_balancing_type", "moe_aux_loss_coeff", "cp_comm_type"):
            value = getattr(self, name)
            values = value if isinstance(value, list | tuple) else (value,)
            fill(self, name, tuple("allgather" if v == "all_gather" else v for v in values))
        if self.expert_tensor_parallel_size is None:
            fill(self, "expert_tensor_parallel_size", self.tensor_model_parallel_size)
        if self.apply_query_key_layer_scaling:
            fill(self, "attention_softmax_in_fp32", True)
