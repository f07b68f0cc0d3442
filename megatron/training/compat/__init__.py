"""What exists for scripts that were written for Megatron-LM, and for nothing else."""
