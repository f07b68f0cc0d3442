"""Capture of CUDA graphs."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config.option import option


@dataclass(frozen=True, kw_only=True)
class CudaGraphConfig:
    """Capture of CUDA graphs."""

    enable_cuda_graph: bool = option(False, "", group="inference")
    cuda_graph_warmup_steps: int = option(3, "", group="inference")
    external_cuda_graph: bool = option(False, "", group="inference")
    cuda_graph_scope: str = option(
        "full",
        "",
        group="inference",
        choices=("full", "attn", "full_iteration"),
    )
