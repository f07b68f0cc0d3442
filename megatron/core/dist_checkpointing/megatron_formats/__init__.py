"""Read and write the checkpoint formats of Megatron-LM, under this project's tensor keys."""
