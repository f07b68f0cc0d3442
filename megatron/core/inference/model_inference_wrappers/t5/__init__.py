"""Wrapper of encoder-decoder models, under their module paths in Megatron-LM."""
