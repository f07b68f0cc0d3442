"""Layers of other packages, by stand-ins."""
