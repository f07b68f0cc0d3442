"""Heterogeneous models: layers of different shapes, as found by architecture search."""
