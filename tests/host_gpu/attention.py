"""What torch's attention kernels of a GPU take and give, computed by the CPU's kernel."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
_ROWS = 32  # of the efficient kernel: its logarithms are filled up to a multiple


def register() -> torch.library.Library:
    """Let the device have them; as long as the result is kept."""
    library = torch.library.Library("aten", "IMPL")
    for function in (_flash, _flash_backward, _efficient, _efficient_backward):
        name = function.__name__.removeprefix("_").replace("_backward", "")
        end = "_backward" if function.__name__.endswith("_backward") else ""
        library.impl(f"_scaled_dot_product_{name}_attention{end}", function, "CUDA")
    return library


def _flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    _check_flash(q, k, v)
    out, lse = _forward(q, k, v, dropout_p, is_causal, scale)
    seed = torch.zeros(2, dtype=torch.int64, device=q.device)
    none = q.new_empty(0)
    return out, lse, none, none, q.shape[2], k.shape[2], seed, none, none


def _flash_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cum_q: Tensor,
    cum_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    seed: Tensor,
    offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    _check_flash(grad, q, k, v, out)
    assert (max_q, max_k) == (q.shape[2], k.shape[2])
    # The kernel reads its memory as packed rows [b, n, q], whatever the strides say.
    assert lse.dtype == torch.float32, "a GPU's flash kernel keeps its logarithms in fp32"
    assert lse.is_contiguous(), "flash attention's backward pass reads a packed log-sum-exp"
    return _backward(grad, q, k, v, out, lse, dropout_p, is_causal, scale)


def _check_flash(*tensors: Tensor) -> None:
    for tensor in tensors:
        if tensor.dtype not in _HALF:
            raise RuntimeError("flash attention only supports fp16 and bf16")
        assert tensor.stride(-1) == 1, "flash attention reads heads of adjacent values"
        assert tensor.shape[-1] % 8 == 0, "torch pads heads to a multiple of 8 before the kernel"
        assert tensor.shape[-1] <= 256, "flash attention has heads of at most 256"


def _efficient(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    if q.shape[1] != k.shape[1]:
        raise RuntimeError("efficient attention has no groups of queries")
    assert bias is None
    out, lse = _forward(q, k, v, dropout_p, is_causal, scale)
    seed = torch.zeros((), dtype=torch.int64, device=q.device)
    return out, F.pad(lse, (0, -lse.shape[-1] % _ROWS)), seed, seed


def _efficient_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    seed: Tensor,
    offset: Tensor,
    dropout_p: float,
    grad_input_mask: list[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    assert lse.shape[-1] % _ROWS == 0
    rows = lse[..., : q.shape[2]].contiguous()
    return *_backward(grad, q, k, v, out, rows, dropout_p, is_causal, scale), None


def _forward(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    assert dropout_p == 0
    kernel = _aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = kernel(q, k, v, 0.0, is_causal, scale=scale)
    return out, lse


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, ...]:
    kernel = _aten._scaled_dot_product_flash_attention_for_cpu_backward
    result: tuple[Tensor, ...] = kernel(grad, q, k, v, out, lse, dropout_p, is_causal, scale=scale)
    return result
