"""Callers of the kernels in C++, one file a kernel; what they return is what plain torch returns.

`fusions.kernels.find` alone imports them, for tensors that `cpu_kernels.take` takes.
"""
