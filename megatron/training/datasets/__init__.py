"""Import paths of Megatron-LM's application datasets."""
