"""Names of Megatron-LM's package of Hugging Face models."""
