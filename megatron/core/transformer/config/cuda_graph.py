"""CUDA graph options."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from megatron.core.config.option import option

_inference = partial(option, group="inference")


@dataclass(frozen=True, kw_only=True)
class CudaGraphConfig:
    """CUDA graph options."""

    enable_cuda_graph: bool = _inference(
        False,
        "Capture layers as CUDA graphs and replay them, forward and backward; excludes "
        "--external-cuda-graph.",
    )
    cuda_graph_warmup_steps: int = _inference(3, "Eager steps before CUDA graph capture.")
    external_cuda_graph: bool = _inference(
        False,
        "Alias of --enable-cuda-graph; does not need Transformer Engine.",
    )
    cuda_graph_scope: str = _inference(
        "full",
        "Scope of CUDA graph capture: each layer (full), its attention (attn), or all "
        "micro-batches of a step (full_iteration).",
        choices=("full", "attn", "full_iteration"),
    )

    @property
    def uses_graphs(self) -> bool:
        """Whether CUDA graphs are captured."""
        return self.enable_cuda_graph or self.external_cuda_graph

    @property
    def captures_layers(self) -> bool:
        """Whether each layer is captured on its own, not the complete iteration."""
        return self.uses_graphs and self.cuda_graph_scope != "full_iteration"
