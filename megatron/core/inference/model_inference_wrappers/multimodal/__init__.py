"""Wrapper of vision-language models, under their module paths in Megatron-LM."""
