"""Implementations of layers by other packages."""
