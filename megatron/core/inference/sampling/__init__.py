"""Choose the next tokens from logits."""
