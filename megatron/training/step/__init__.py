"""One optimizer step, and evaluation."""
