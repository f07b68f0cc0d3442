"""Layers that carry a state along the sequence: Mamba-2, and stacks that mix it with attention."""
