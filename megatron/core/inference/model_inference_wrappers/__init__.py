"""Wrappers that tell an engine how to run a model."""
