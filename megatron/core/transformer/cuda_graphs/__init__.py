"""Layers as CUDA graphs: recorded once, then replayed without Python."""

from megatron.core.transformer.cuda_graphs.replay import LayerGraphs

__all__ = ["LayerGraphs"]
