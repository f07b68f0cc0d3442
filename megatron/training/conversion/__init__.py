"""Convert checkpoints from and to other formats, tensor by tensor; no GPU is needed."""
