"""Kernels in Triton; these modules alone import it, and `fusions.kernels` alone imports them.

What they compute in is float32, whatever they read and write; what they sum has one order.  Where
torch's own kernels move as few bytes there is none here: GELU (its bias rides in the matrix
product), softmax (inside attention's), the norm of gradients, AdamW of float32 parameters, sums of
16-bit products in float32.  No kernel waits for the device or takes memory, so a CUDA graph can
record it.
"""
