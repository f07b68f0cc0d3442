"""Wrappers of the C++ kernels, one file per kernel; they return what the plain torch form returns.

Only `fusions.kernels.find` imports them, for tensors that `cpu_kernels.take` accepts.
"""
