"""Wrapper of decoder-only models, under their module paths in Megatron-LM."""
