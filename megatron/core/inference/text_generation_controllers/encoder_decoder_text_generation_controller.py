"""Controller of encoder-decoder models, under its module path in Megatron-LM."""

from megatron.core.inference.v014.controllers import (
    EncoderDecoderTextGenerationController as EncoderDecoderTextGenerationController,
)
