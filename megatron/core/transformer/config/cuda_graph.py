"""Capture of CUDA graphs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from megatron.core.config.option import option

_inference = partial(option, group="inference")


@dataclass(frozen=True, kw_only=True)
class CudaGraphConfig:
    """Capture of CUDA graphs."""

    enable_cuda_graph: bool = _inference(
        False,
        "Replay layers as CUDA graphs, forward and backward, instead of launching their kernels.",
    )
    cuda_graph_warmup_steps: int = _inference(
        3, "Steps that run eagerly before CUDA graphs are recorded."
    )
    external_cuda_graph: bool = _inference(
        False,
        "Record CUDA graphs by Transformer Engine.",
        refused="it hands layers of Transformer Engine to its make_graphed_callables(), which is "
        "not done in this version; use --enable-cuda-graph",
    )
    cuda_graph_scope: str = _inference(
        "full",
        "What a CUDA graph covers: a whole layer, or its attention.",
        choices=("full", "attn", "full_iteration"),
    )
