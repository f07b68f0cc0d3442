"""Sizes of a dynamic engine, under its module path in Megatron-LM."""

from megatron.core.inference.v014.contexts import (
    ActiveRequestCountOverflowError as ActiveRequestCountOverflowError,
)
from megatron.core.inference.v014.contexts import ChunkOverflowError as ChunkOverflowError
from megatron.core.inference.v014.contexts import ContextOverflowError as ContextOverflowError
from megatron.core.inference.v014.contexts import DynamicInferenceContext as DynamicInferenceContext
from megatron.core.inference.v014.contexts import (
    MaxSequenceLengthOverflowError as MaxSequenceLengthOverflowError,
)
from megatron.core.inference.v014.contexts import RequestOverflowError as RequestOverflowError
from megatron.core.inference.v014.contexts import TokenOverflowError as TokenOverflowError
