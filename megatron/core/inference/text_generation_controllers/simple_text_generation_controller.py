"""The name of `TextGenerationController` before Megatron Core 0.11."""

from megatron.core.inference.v014.controllers import TextGenerationController

SimpleTextGenerationController = TextGenerationController
