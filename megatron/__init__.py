"""A training application for large transformers, and the library under it."""
