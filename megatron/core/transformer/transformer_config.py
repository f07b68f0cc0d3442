"""TransformerConfig, composed of the dataclasses in transformer/config.

Sizes are global, before sharding.  Construction fills in defaults that depend on other fields;
see `CheckedConfig` for values that are assigned later.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from megatron.core.config import flag_messages
from megatron.core.config.errors import ConfigError
from megatron.core.config.option import library_field
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.params.param_init import Init, InitMethod
from megatron.core.transformer.config.attention import (
    AttentionConfig,
    MLAConfig,
    SparseAttentionConfig,
)
from megatron.core.transformer.config.base import BaseConfig, MLPConfig
from megatron.core.transformer.config.execution import (
    CudaGraphConfig,
    FusionConfig,
    RecomputeConfig,
)
from megatron.core.transformer.config.moe import MoEConfig
from megatron.core.transformer.config.precision import PrecisionConfig
from megatron.core.transformer.config.rules import LIBRARY_RULES, RULES
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

_DERIVED: Any = None
_FP8_PATH = "this fp8 path is not available in this program; use fp8 and fp8_recipe"
_LAYERS_OF_FILE = "heterogeneous_layers_config_path decides"


@dataclass(kw_only=True)
class TransformerConfig(
    BaseConfig,
    AttentionConfig,
    MLPConfig,
    MoEConfig,
    MLAConfig,
    SparseAttentionConfig,
    PrecisionConfig,
    RecomputeConfig,
    FusionConfig,
    CudaGraphConfig,
    ModelParallelConfig,
):
    """Configuration of a stack of transformer layers."""

    RULES = RULES
    LIBRARY_RULES = LIBRARY_RULES

    gated_linear_unit: bool = False
    activation_func: Callable[[Tensor], Tensor] = F.gelu
    bias_activation_fusion: bool = False
    init_seed: int | None = None  # of initial weights; None: torch's seed when a model is built

    # Derived from other fields if not given; a function that fills a tensor in place.
    init_method: InitMethod = _DERIVED  # of weight matrices
    output_layer_init_method: InitMethod = _DERIVED  # of projections into the residual stream
    embedding_init_method: InitMethod = _DERIVED  # of word embeddings

    init_model_with_meta_device: bool = library_field(
        False, "DistributedDataParallelConfig.init_model_with_meta_device decides"
    )
    memory_efficient_layer_norm: bool = library_field(False, flag_messages.NO_KERNEL)
    moe_token_dropping: bool = library_field(
        False, "moe_expert_capacity_factor decides which tokens are dropped"
    )
    moe_router_topk_limited_devices: int | None = None  # a group is the experts of a rank
    moe_layer_recompute: bool = False
    moe_per_layer_logging: bool = library_field(False, "the caller of the log decides")
    cuda_graph_use_single_mempool: bool = library_field(False, flag_messages.NO_KERNEL)
    cuda_graph_retain_backward_graph: bool = library_field(False, flag_messages.NO_KERNEL)
    disable_parameter_transpose_cache: bool = library_field(False, flag_messages.NO_KERNEL)
    heterogeneous_block_specs: bool = library_field(False, _LAYERS_OF_FILE)
    hetereogenous_dist_checkpoint: bool = library_field(False, _LAYERS_OF_FILE)
    activation_func_fp8_input_store: bool = library_field(False, _FP8_PATH, refused=True)
    fp8_dot_product_attention: bool = library_field(False, _FP8_PATH, refused=True)
    fp8_multi_head_attention: bool = library_field(False, _FP8_PATH, refused=True)
    tp_only_amax_red: bool = library_field(False, _FP8_PATH, refused=True)
    use_kitchen: bool = library_field(False, flag_messages.KITCHEN, refused=True)
    quant_recipe: Any = library_field(None, flag_messages.KITCHEN, refused=True)

    @property
    def residual_width(self) -> int:
        """Width of a token's hidden states between layers: that of all residual streams."""
        return self.hidden_size * (
            self.mhc_num_residual_streams if self.enable_mhc_connections else 1
        )

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

    def derive(self) -> None:
        """Fill in values that depend on other fields."""
        super().derive()
        if self.ffn_hidden_size is None:
            self.ffn_hidden_size = 4 * self.hidden_size
        if self.multi_latent_attention:  # head width is the sum of unrotated and rotated channels
            self.kv_channels = self.qk_head_dim + self.qk_pos_emb_head_dim
            self.num_query_groups = self.num_attention_heads
        if self.kv_channels is None and self.num_attention_heads:
            self.kv_channels = self.hidden_size // self.num_attention_heads
        if self.num_query_groups is None:
            self.num_query_groups = self.num_attention_heads
        if self.num_moe_experts is not None and self.moe_ffn_hidden_size is None:
            self.moe_ffn_hidden_size = self.ffn_hidden_size
        if self.moe_layer_recompute and self.num_moe_experts:
            self.recompute_modules = [*{*self.modules_to_recompute, "moe"}]
            self.recompute_granularity = "selective"
        if self.moe_router_topk_limited_devices and not self.moe_router_group_topk:
            self.moe_router_group_topk = self.moe_router_topk_limited_devices
            self.moe_router_num_groups = self.expert_model_parallel_size
        if (self.moe_expert_capacity_factor or 0) < 0:
            self.moe_expert_capacity_factor = None
        if self.apply_query_key_layer_scaling:
            self.attention_softmax_in_fp32 = True
        if self.mtp_loss_scaling_factor is None:
            self.mtp_loss_scaling_factor = 0.1
        layout = self.pipeline_model_parallel_layout
        if layout is not None and not isinstance(layout, PipelineParallelLayerLayout):
            ranks = self.pipeline_model_parallel_size
            layout = PipelineParallelLayerLayout(layout, ranks)
            self.pipeline_model_parallel_layout = layout
            with suppress(ConfigError):  # of a wrong text, which the split of the layers reports
                chunks = layout.virtual_pipeline_model_parallel_size
                if chunks > 1 and self.virtual_pipeline_model_parallel_size is None:
                    self.virtual_pipeline_model_parallel_size = chunks
        self._derive_mup()
        parts = 1 if self.is_hybrid_model else 2  # sublayers per layer that add to the residual
        hidden = self.init_method_std / math.sqrt(self.mup_width_mult)
        in_residual = hidden / math.sqrt(parts * max(self.num_layers, 1))
        std = self.embedding_init_method_std
        # `replace` passes what was derived for the config that it copies.
        if _is_derived(self.init_method):
            self.init_method = self._initialization(hidden)
        if _is_derived(self.output_layer_init_method):
            self.output_layer_init_method = self._initialization(in_residual)
        if _is_derived(self.embedding_init_method):
            own = self.vocabulary_init_method
            self.embedding_init_method = (
                own if std is None else Init("normal", std, is_derived=True)
            )

    @property
    def vocabulary_init_method(self) -> InitMethod:
        """Initialization of an output layer, and of word embeddings without a std of their own."""
        if self.use_mup and _is_derived(self.init_method):
            return self._initialization(self.init_method_std)
        return self.init_method

    def _derive_mup(self) -> None:
        """Set the multipliers of muP (arXiv 2203.03466, table 8); `mup_factors` has the others.

        Output weights keep the variance and the learning rate of the base model; their input is
        divided by the width.  So they can be tied to the embedding.
        """
        if not self.use_mup or not self.hidden_size:
            return
        self.mup_width_mult = self.hidden_size / (self.mup_base_hidden_size or self.hidden_size)
        if self.softmax_scale is None and self.kv_channels:
            power = self.mup_attn_scale_power
            self.softmax_scale = (self.mup_base_head_dim or 1) ** (power - 0.5)
            self.softmax_scale /= self.kv_channels**power
        if self.embedding_scale is None:
            self.embedding_scale = self.mup_embedding_mult
        if self.output_scale is None:
            self.output_scale = self.mup_output_mult / self.mup_width_mult

    def _initialization(self, std: float) -> Init:
        if self.init_method_xavier_uniform:
            return Init("xavier_uniform", is_derived=True)
        return Init("normal", std, is_derived=True)


def _is_derived(init: InitMethod | None) -> bool:
    return init is None or (isinstance(init, Init) and init.is_derived)


@dataclass(kw_only=True)
class MLATransformerConfig(TransformerConfig):
    """Configuration of layers with multi-latent attention, with Megatron Core's defaults."""

    multi_latent_attention: bool = True
    q_lora_rank: int | None = 512
    kv_lora_rank: int = 512
    normalization: str = "RMSNorm"
    rope_type: str | None = "yarn"
    rotary_scaling_factor: float = 40.0
    rotary_base: float = 10000.0
    rotary_percent: float = 1.0
    original_max_position_embeddings: int = 4096
    max_position_embeddings: int | None = None  # its name before v0.14, which mbridge passes
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    def derive(self) -> None:
        """Set the fields by which the other configs adjust YaRN."""
        super().derive()
        if self.max_position_embeddings is not None:
            self.original_max_position_embeddings = self.max_position_embeddings
        self.yarn_original_max_position_embeddings = self.original_max_position_embeddings
        self.yarn_beta_fast = self.beta_fast
        self.yarn_beta_slow = self.beta_slow
