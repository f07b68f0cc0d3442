"""Controller of decoder-only models, under its module path in Megatron-LM."""

from megatron.core.inference.v014.controllers import (
    TextGenerationController as TextGenerationController,
)
