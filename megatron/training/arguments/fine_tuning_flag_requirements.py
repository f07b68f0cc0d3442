"""Flags of conversations and of text during training that have an effect only with another flag."""

from __future__ import annotations

from megatron.training.arguments.requirement import needs_flag, needs_value

OF_FINE_TUNING = (
    needs_flag("sft", "sft_packing sft_long_conversations sft_alignment sft_show_sample"),
    needs_value("tokenizer_type", "SFTTokenizer", "sft_tokenizer_prompt_format"),
    needs_flag("eval_generate", "eval_generate_tokens"),
)
