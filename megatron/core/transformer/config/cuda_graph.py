"""Capture of CUDA graphs."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config import states
from megatron.core.config.option import option


@dataclass(frozen=True, kw_only=True)
class CudaGraphConfig:
    """Capture of CUDA graphs."""

    enable_cuda_graph: bool = option(
        False,
        "Capture layers as CUDA graphs.",
        group="inference",
        refused=states.CUDA_GRAPHS,
    )
    cuda_graph_warmup_steps: int = option(
        3,
        "Steps before CUDA graphs are captured.",
        group="inference",
        ignored=states.only_with("--enable-cuda-graph"),
    )
    external_cuda_graph: bool = option(
        False,
        "Capture CUDA graphs outside the layers.",
        group="inference",
        refused=states.CUDA_GRAPHS,
    )
    cuda_graph_scope: str = option(
        "full",
        "Part of a step that a CUDA graph covers.",
        group="inference",
        choices=("full", "attn", "full_iteration"),
        ignored=states.only_with("--enable-cuda-graph"),
    )
