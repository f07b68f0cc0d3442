"""CUDA graphs of transformer layers: captured once, then replayed without Python."""

from megatron.core.transformer.cuda_graphs.replay import LayerGraphs

__all__ = ["LayerGraphs"]
