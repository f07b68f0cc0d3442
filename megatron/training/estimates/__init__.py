"""Arithmetic on the configuration: layers, parameters, FLOPs, memory, chunk sizes."""
