"""Data-parallel gradients and parameters."""
