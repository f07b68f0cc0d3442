"""Embeddings of words and positions."""

from megatron.core.models.common.embeddings.language_model_embedding import (
    LanguageModelEmbedding as LanguageModelEmbedding,
)
from megatron.core.models.common.embeddings.relative_pos_embedding import (
    RelativePositionEmbedding as RelativePositionEmbedding,
)
from megatron.core.models.common.embeddings.rotary_pos_embedding import (
    MultimodalRotaryEmbedding as MultimodalRotaryEmbedding,
)
from megatron.core.models.common.embeddings.rotary_pos_embedding import (
    RotaryEmbedding as RotaryEmbedding,
)
