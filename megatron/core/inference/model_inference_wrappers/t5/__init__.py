"""The wrapper of encoder-decoder models."""
