"""Quantization of trained weights: formats, fake quantization (QAT), calibration (PTQ)."""
