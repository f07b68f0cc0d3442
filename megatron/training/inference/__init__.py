"""Text and embeddings from a checkpoint."""
