"""The wrapper of decoder-only models."""
