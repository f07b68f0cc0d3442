"""Training on pairs of answers: direct preference optimization and reward models."""
