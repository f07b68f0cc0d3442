"""Fused kernels: one file per kernel, with its plain reference beside it."""
