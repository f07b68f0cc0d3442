"""Triton kernels; only these modules import triton, and only `fusions.kernels` imports them.

They compute in float32 whatever they read and write, and sum in a fixed order.  There is no kernel
where torch's own moves as few bytes: GELU (with its bias in the matmul), softmax (part of
attention), gradient norm, AdamW of float32 parameters, 16-bit matmuls with float32 accumulation.
No kernel synchronizes with the host or allocates memory, so CUDA graphs can capture them.
"""
