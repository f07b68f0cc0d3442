"""Datasets of RETRO: a database of chunks, an index of them, and samples with their neighbors."""
