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
        "The same as --enable-cuda-graph, and needs no Transformer Engine.",
    )
    cuda_graph_scope: str = _inference(
        "full",
        "What a CUDA graph covers: a whole layer, its attention, or all micro-batches of a step.",
        choices=("full", "attn", "full_iteration"),
    )

    @property
    def uses_graphs(self) -> bool:
        """Whether anything is recorded."""
        return self.enable_cuda_graph or self.external_cuda_graph

    @property
    def records_layers(self) -> bool:
        """Whether it is layers, each by itself."""
        return self.uses_graphs and self.cuda_graph_scope != "full_iteration"
