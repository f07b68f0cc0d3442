"""Controllers of Megatron-LM's engines: text in, text out."""
