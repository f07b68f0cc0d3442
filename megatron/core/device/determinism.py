"""Deterministic mode of torch: environment, settings, and sums that a GPU has no fixed order for.

Under ``torch.use_deterministic_algorithms(True)`` torch raises RuntimeError in operations whose
CUDA kernels add in no fixed order.  Of those, this program needs only the cumulative sum of floats;
`tests.support.host_gpu` raises like a GPU does if another one is used.
"""

from __future__ import annotations

from collections.abc import MutableMapping

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core import device

_DETERMINISTIC_NCCL = ("Tree", "Ring", "CollnetDirect", "CollnetChain", "^NVLS")
_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
_DETERMINISTIC_CUBLAS = (":4096:8", ":16:8")  # one workspace per stream; the first is the faster


def require(environ: MutableMapping[str, str]) -> list[str]:
    """Make this process deterministic; return the problems of its environment variables.

    On a GPU it sets CUBLAS_WORKSPACE_CONFIG, which cuBLAS reads once: call it before any GEMM.
    """
    problems = []
    if device.is_cuda():
        found = {"NCCL_ALGO": _DETERMINISTIC_NCCL, _CUBLAS: _DETERMINISTIC_CUBLAS}
        environ.setdefault(_CUBLAS, _DETERMINISTIC_CUBLAS[0])
        problems = [
            f"--deterministic-mode: the environment variable {name} is {environ.get(name)}; set it "
            f"to one of {', '.join(allowed)}"
            for name, allowed in found.items()
            if environ.get(name) not in allowed
        ]
    torch.use_deterministic_algorithms(True)
    # Nothing reads memory before it is written, so to fill each new tensor with NaN is only a cost.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    return problems


def cumulative_sum(
    x: Tensor, dim: int, *, dtype: torch.dtype | None = None, in_fixed_order: bool = False
) -> Tensor:
    """Return ``x.cumsum(dim)``; in deterministic mode on a GPU, sum floats in a fixed order.

    That order (Hillis and Steele 1986) takes log2(n) passes over ``n`` elements.  With
    ``in_fixed_order`` a GPU always uses it: the order of its kernel depends on the other sums.
    """
    if not (
        (in_fixed_order or torch.are_deterministic_algorithms_enabled())
        and device.is_cuda(x.device)
        and x.is_floating_point()
    ):
        return x.cumsum(dim, dtype=dtype)
    sums = x.to(dtype or x.dtype).movedim(dim, -1)
    step = 1
    while step < sums.shape[-1]:
        sums = sums + F.pad(sums[..., :-step], (step, 0))
        step *= 2
    return sums.movedim(-1, dim)
