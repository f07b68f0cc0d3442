"""Distillation from a teacher in the run, or from its stored log-probabilities."""
