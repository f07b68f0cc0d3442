"""The name of `TextGenerationController` before Megatron Core 0.11."""

from megatron.core.inference.text_generation_controllers.text_generation_controller import (
    TextGenerationController,
)

SimpleTextGenerationController = TextGenerationController
