"""Generate text and compute embeddings from a checkpoint."""
