"""Optimizers with main parameters, clipping and loss scaling."""
