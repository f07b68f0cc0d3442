"""Wrappers, under their module paths in Megatron-LM."""
