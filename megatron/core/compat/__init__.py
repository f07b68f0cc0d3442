"""Megatron Core's API where this project has another one: import paths, classes and functions.

Nothing else in this repository imports this package, except to install its import paths.
"""
