"""Transformer Engine in the places of our layers: ``--transformer-impl transformer_engine``.

The names are those of Megatron Core.  They import without the package, and say what is missing
when one is built.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from megatron.core import optional
from megatron.core.extensions.transformer_engine.engine import WANTED_BY
from megatron.core.lazy import lazy_exports

_NAMES = {
    "attention": "TEDotProductAttention",
    "engine": "unsupported_reason unsupported_matrices_reason",
    "layers": "TEColumnParallelGroupedLinear TEColumnParallelLinear TELinear TENorm "
    "TELayerNormColumnParallelLinear TERowParallelGroupedLinear TERowParallelLinear",
}
_HOMES = {name: f"{__name__}.{home}" for home, names in _NAMES.items() for name in names.split()}
__all__ = ["SplitAlongDim", "TEDelayedScaling", *_HOMES]
__getattr__ = lazy_exports(__name__, _HOMES)


def SplitAlongDim(x: Tensor, dim: int, sizes: Sequence[int]) -> tuple[Tensor, ...]:  # noqa: N802
    """``x`` in pieces of ``sizes`` along ``dim``."""
    return torch.split(x, list(sizes), dim)


class _DelayedScaling(Protocol):
    """What is read of a config."""

    fp8_margin: int
    fp8_amax_history_len: int
    fp8_amax_compute_algo: str


def TEDelayedScaling(  # noqa: N802
    config: _DelayedScaling,
    fp8_format: object,
    override_linear_precision: tuple[bool, ...] = (),
) -> object:
    """The package's recipe of delayed scaling, for scripts that enter its autocast themselves."""
    keeps = {"override_linear_precision": override_linear_precision}  # of versions that have it
    return optional.require("transformer_engine.common.recipe", WANTED_BY).DelayedScaling(
        margin=config.fp8_margin,
        fp8_format=fp8_format,
        amax_history_len=config.fp8_amax_history_len,
        amax_compute_algo=config.fp8_amax_compute_algo,
        **(keeps if any(override_linear_precision) else {}),
    )
