"""The classes from which a layer spec is built, as Megatron Core's specs ask for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.core.extensions.transformer_engine import (
    TEColumnParallelLinear,
    TEDotProductAttention,
    TELayerNormColumnParallelLinear,
    TELinear,
    TENorm,
    TERowParallelLinear,
)
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import (
    SequentialMLP,
    TEColumnParallelGroupedLinear,
    TEGroupedMLP,
    TERowParallelGroupedLinear,
)
from megatron.core.transformer.norms import Norm
from megatron.core.transformer.spec_utils import Slot


@dataclass(frozen=True)
class BackendSpecProvider:
    """Classes of submodules, by default plain PyTorch; a project may override the methods."""

    column: Slot = ColumnParallelLinear
    row: Slot = RowParallelLinear
    replicated: Slot = ReplicatedLinear
    norm: Slot = Norm
    attention: Slot = DotProductAttention
    column_behind_norm: Slot | None = None

    def column_parallel_linear(self) -> Slot:
        """Return the class of linear layers with sharded outputs."""
        return self.column

    def row_parallel_linear(self) -> Slot:
        """Return the class of linear layers with sharded inputs."""
        return self.row

    def linear(self) -> Slot:
        """Return the class of linear layers that every rank computes in full."""
        return self.replicated

    def fuse_layernorm_and_linear(self) -> bool:
        """Return whether one module has a norm and the linear layer behind it."""
        return self.column_parallel_layer_norm_linear() is not None

    def column_parallel_layer_norm_linear(self) -> Slot | None:
        """Return the class of such a module."""
        return self.column_behind_norm

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> Slot:
        """Return the class of norms; the config says which norm it is."""
        return self.norm

    def core_attention(self) -> Slot:
        """Return the class of attention cores."""
        return self.attention

    def grouped_mlp_modules(
        self, moe_use_grouped_gemm: bool, moe_use_legacy_grouped_gemm: bool = False
    ) -> tuple[Any, MLPSubmodules]:
        """Return the class of a rank's experts, and their linear layers."""
        matrices = MLPSubmodules(self.column_parallel_linear(), self.row_parallel_linear())
        return SequentialMLP, matrices


@dataclass(frozen=True)
class TESpecProvider(BackendSpecProvider):
    """Classes of Transformer Engine.

    Where the package cannot run, its layers compute by our code, with the same parameter names.
    """

    column: Slot = TEColumnParallelLinear
    row: Slot = TERowParallelLinear
    replicated: Slot = TELinear
    norm: Slot = TENorm
    attention: Slot = TEDotProductAttention
    column_behind_norm: Slot | None = TELayerNormColumnParallelLinear

    def grouped_mlp_modules(
        self, moe_use_grouped_gemm: bool, moe_use_legacy_grouped_gemm: bool = False
    ) -> tuple[Any, MLPSubmodules]:
        """Return the class of a rank's experts, and their linear layers."""
        if not moe_use_grouped_gemm:
            return super().grouped_mlp_modules(moe_use_grouped_gemm)
        both = MLPSubmodules(TEColumnParallelGroupedLinear, TERowParallelGroupedLinear)
        return TEGroupedMLP, both


LocalSpecProvider = BackendSpecProvider
