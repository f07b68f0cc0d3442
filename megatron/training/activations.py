"""Megatron-LM's import path of the functions in `megatron.core.activations`."""

from megatron.core.activations import fast_gelu as fast_gelu
from megatron.core.activations import quick_gelu as quick_gelu
from megatron.core.activations import squared_relu as squared_relu
