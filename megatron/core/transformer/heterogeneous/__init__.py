"""Layers that differ in shape, as architecture search leaves them."""
