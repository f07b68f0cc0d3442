"""Controllers, under their module paths in Megatron-LM."""
