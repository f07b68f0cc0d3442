"""Base class of models that end in a vocabulary."""
