"""The GPT family."""

from megatron.core.models.gpt.gpt_model import GPTModel as GPTModel
