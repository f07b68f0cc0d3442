"""The path under which scripts import rotary positions."""

from megatron.core.fusions.rope import apply_rotary as apply_rotary
from megatron.core.transformer.rope import MultimodalRotaryEmbedding as MultimodalRotaryEmbedding
from megatron.core.transformer.rope import RotaryEmbedding as RotaryEmbedding
