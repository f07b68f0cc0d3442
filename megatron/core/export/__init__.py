"""Export of models to formats of other programs, by Megatron Core's names."""
