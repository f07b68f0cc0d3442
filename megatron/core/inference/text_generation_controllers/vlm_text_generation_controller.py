"""Controller of vision-language models, under its module path in Megatron-LM."""

from megatron.core.inference.v014.controllers import (
    VLMTextGenerationController as VLMTextGenerationController,
)
