"""Train step and evaluation."""
