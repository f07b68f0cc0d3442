"""The kinds of models that the entry scripts train."""
