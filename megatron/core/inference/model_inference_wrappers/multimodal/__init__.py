"""The wrapper of models that read images."""
