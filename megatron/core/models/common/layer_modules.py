"""The classes that layers are built from: ours, or Transformer Engine's."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import cache

from megatron.core import device
from megatron.core.config.errors import MissingDependency
from megatron.core.extensions.transformer_engine import (
    TEColumnParallelLinear,
    TEDotProductAttention,
    TELayerNormColumnParallelLinear,
    TENorm,
    TERowParallelLinear,
    unsupported_matrices_reason,
    unsupported_reason,
)
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.heterogeneous.heterogeneous_config import layer_shapes
from megatron.core.transformer.norms import Norm
from megatron.core.transformer.spec_utils import Slot
from megatron.core.transformer.transformer_config import TransformerConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LayerParts:
    """Classes of submodules; ``column_behind_norm`` is a norm fused with the next linear layer."""

    column: Slot = ColumnParallelLinear
    row: Slot = RowParallelLinear
    norm: Slot = Norm
    core_attention: Slot = DotProductAttention
    column_behind_norm: Slot | None = None

    def with_norm_inside(self, config: TransformerConfig | None) -> LayerParts | None:
        """Return the parts with norms fused into linear layers; None if a norm must be separate."""
        if self.column_behind_norm is None:
            return None
        if config is not None and (
            layer_shapes(config) is not None  # another part may take the place of the matrix
            or config.layer_norm_placement != "pre"
            or config.apply_residual_connection_post_layernorm
            or config.fp32_residual_connection
            or "layernorm" in config.modules_to_recompute
        ):
            return None
        return replace(self, column=self.column_behind_norm)


LOCAL = LayerParts()


def transformer_engine_parts(config: TransformerConfig | None) -> LayerParts:
    """Return Transformer Engine's classes; ours where it cannot do what ``config`` requests.

    Logs the fallback once.  Raises MissingDependency if --require-transformer-engine forbids it.
    """
    # A plan is made for another machine.
    if device.is_cuda() and not device.launches_kernels(device.current()):
        return LOCAL
    reason = unsupported_reason()
    if reason is None and config is not None:
        reason = unsupported_matrices_reason(config)
        parts = replace(LOCAL, norm=TENorm, core_attention=TEDotProductAttention)
    else:
        parts = LOCAL
    if reason is None:
        return LayerParts(
            column=TEColumnParallelLinear,
            row=TERowParallelLinear,
            norm=TENorm,
            core_attention=TEDotProductAttention,
            column_behind_norm=TELayerNormColumnParallelLinear,
        )
    which = "" if parts is LOCAL else " for matrices"
    if config is not None and config.require_transformer_engine:
        raise MissingDependency(
            f"--require-transformer-engine{which}: {reason}; install "
            "transformer-engine, or use the layers of this program without the flag"
        )
    _warn(f"--transformer-impl transformer_engine falls back to local{which}: {reason}")
    return parts


@cache
def _warn(sentence: str) -> None:
    logger.warning(sentence)
