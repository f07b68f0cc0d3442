"""Checkpoints from and to other programs, tensor by tensor: no model is built, no GPU is needed."""
