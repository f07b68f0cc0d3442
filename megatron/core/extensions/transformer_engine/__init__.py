"""Layers that compute with Transformer Engine (``--transformer-impl transformer_engine``).

The names are those of Megatron Core.  They can be imported without the package; building a layer
then raises MissingDependency.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.core import optional
from megatron.core.extensions.transformer_engine.engine import WANTED_BY
from megatron.core.optional import lazy_exports

_NAMES = {
    "attention": "TEDotProductAttention",
    "engine": "unsupported_reason unsupported_matrices_reason",
    "layers": "TEColumnParallelLinear TELinear TENorm TELayerNormColumnParallelLinear "
    "TERowParallelLinear",
    "user_buffers": "use_user_buffers",
}
_HOMES = {name: f"{__name__}.{home}" for home, names in _NAMES.items() for name in names.split()}
__all__ = ["SplitAlongDim", "TEDelayedScaling", *_HOMES]
__getattr__ = lazy_exports(__name__, _HOMES)


def SplitAlongDim(x: Tensor, dim: int, sizes: Sequence[int]) -> tuple[Tensor, ...]:  # noqa: N802
    """Split ``x`` along ``dim`` into parts of the given ``sizes``."""
    return torch.split(x, list(sizes), dim)


def TEDelayedScaling(  # noqa: N802
    config: Any,
    fp8_format: object,
    override_linear_precision: tuple[bool, ...] = (),
) -> object:
    """Return the package's delayed scaling recipe, for scripts that enter its autocast themselves.

    Raises MissingDependency without the package.
    """
    keeps = {"override_linear_precision": override_linear_precision}  # not in all versions
    return optional.require("transformer_engine.common.recipe", WANTED_BY).DelayedScaling(
        margin=config.fp8_margin,
        fp8_format=fp8_format,
        amax_history_len=config.fp8_amax_history_len,
        amax_compute_algo=config.fp8_amax_compute_algo,
        **(keeps if any(override_linear_precision) else {}),
    )
