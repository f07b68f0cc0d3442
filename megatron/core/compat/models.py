"""Models and parts of models that Megatron Core, or its package before, has in another form."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.config.errors import ConfigError
from megatron.core.models.mamba.mamba_model import MambaModel
from megatron.core.parallel.default_groups import library_call
from megatron.core.params.param_init import Init
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.norms import Norm
from megatron.core.transformer.rope import RopeScaling, RotaryEmbedding, yarn_mscale
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig


class YarnRotaryEmbedding(RotaryEmbedding):
    """YaRN, whose parameters Megatron Core passes one by one."""

    @library_call(
        "... rotary_percent rotary_interleaved seq_len_interpolation_factor rotary_base "
        "use_cpu_initialization scaling_factor original_max_position_embeddings beta_fast "
        "beta_slow mscale mscale_all_dim cp_group",
        like=RotaryEmbedding.__init__,
    )
    def __init__(
        self,
        kv_channels: int,
        *,
        scaling_factor: float = 1.0,
        original_max_position_embeddings: int = 4096,
        beta_fast: float = 32.0,
        beta_slow: float = 1.0,
        mscale: float = 1.0,
        mscale_all_dim: float = 0.0,
        **of_rotary: Any,
    ) -> None:
        ratio = yarn_mscale(scaling_factor, mscale) / yarn_mscale(scaling_factor, mscale_all_dim)
        scaling = RopeScaling(
            kind="yarn",
            factor=scaling_factor,
            original_max_positions=original_max_position_embeddings,
            beta_fast=beta_fast,
            beta_slow=beta_slow,
            attention_factor=ratio,
        )
        super().__init__(kv_channels, scaling=scaling, **of_rotary)
        self.amplitude = ratio

    def forward(  # type: ignore[override]
        self, max_seq_len: int, offset: int = 0, packed_seq: bool = False
    ) -> tuple[Tensor, float]:
        """Return the angle of each channel [s, 1, 1, r], and the factor of cosines and sines."""
        return super().forward(max_seq_len, offset, packed_seq), self.amplitude


def yarn_factor_of_config(config: Any) -> float:
    """Return YaRN's factor of cosines and sines by fields of a later config; 1 without them."""
    scale = vars(config).get("yarn_rotary_scaling_factor")
    if scale is None:
        return 1.0
    return yarn_mscale(scale, config.yarn_mscale) / yarn_mscale(scale, config.yarn_mscale_all_dim)


class HybridModel(MambaModel):
    """MambaModel by its later name, with the pattern of layers as ``hybrid_layer_pattern``."""

    def __init__(
        self,
        config: TransformerConfig,
        hybrid_stack_spec: ModuleSpec,
        vocab_size: int,
        max_sequence_length: int,
        hybrid_layer_pattern: str | None = None,
        **of_mamba: Any,
    ) -> None:
        super().__init__(
            config,
            hybrid_stack_spec,
            vocab_size,
            max_sequence_length,
            hybrid_override_pattern=hybrid_layer_pattern,
            **of_mamba,
        )


class HuggingFaceModule(MegatronModule):
    """Base of modules that contain a model of transformers, complete on every rank."""

    input_tensor: Tensor | None = None

    def set_input_tensor(self, input_tensor: Tensor | None) -> None:
        """Set the hidden states that the previous stage sent."""
        self.input_tensor = input_tensor


def get_norm(config: TransformerConfig) -> nn.Module:
    """Return a norm of hidden states, as ``config.normalization`` names it."""
    return Norm(config, config.hidden_size, config.layernorm_epsilon)


def get_linear_layer(
    rows: int, columns: int, init_method: Init, perform_initialization: bool = True
) -> nn.Linear:
    """Return torch's layer of ``rows`` inputs, whose bias is zero."""
    layer = nn.Linear(rows, columns)
    if perform_initialization:
        init_method(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def attention_mask_func(attention_scores: Tensor, attention_mask: Tensor) -> Tensor:
    """Set the scores of hidden keys to -10000, in place."""
    return attention_scores.masked_fill_(attention_mask, -10000.0)


def get_all_true_mask(size: tuple[int, ...], device: torch.device) -> Tensor:
    """Return a mask that is True everywhere, such as RETRO's ``context_mask``."""
    return torch.ones(size, dtype=torch.bool, device=device)


def erf_gelu(x: Tensor) -> Tensor:
    """Apply GELU, computed by the error function."""
    return F.gelu(x)


class _Later:
    """Part of a later Megatron Core: projects may import and inherit it, and not build it."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        raise ConfigError(f"{type(self).__name__}: models with it are not supported")


class DSAIndexer(_Later):
    """Choice of the keys of sparse attention."""


class GatedDeltaNetSubmodules(_Later):
    """Submodules of linear attention by a gated delta rule."""
