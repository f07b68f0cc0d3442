"""Checkpoints that Megatron-LM wrote, under this project's keys."""
