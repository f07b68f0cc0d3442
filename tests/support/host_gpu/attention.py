"""What torch's attention kernels of a GPU take and give, computed by operations of the CPU.

Flash attention is the formula in float32, with NaN for what the kernel leaves unwritten.
"""

from __future__ import annotations

import math
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
    for function in (_flash_attention_forward, _flash_attention_backward):
        library.impl(function.__name__, function, "CUDA")
    for function in (_efficient, _efficient_backward, _cudnn, _cudnn_backward):
        name = function.__name__.removeprefix("_").replace("_backward", "")
        end = "_backward" if function.__name__.endswith("_backward") else ""
        library.impl(f"_scaled_dot_product_{name}_attention{end}", function, "CUDA")
    return library


def _flash_attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cum_q: Tensor | None,
    cum_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, ...]:
    _check_flash(q, k, v, cum_q, cum_k)
    window = (window_size_left, 0 if is_causal else window_size_right)
    seen, written = _seen(q, k, cum_q, (max_q, max_k), window)
    scores = _scores(q, k, scale).masked_fill(~seen, -math.inf)
    lse = scores.logsumexp(-1)
    is_empty = lse == -math.inf
    probs = (scores - lse.masked_fill(is_empty, 0).unsqueeze(-1)).exp()
    state = _seed(q, dropout_p).expand(2).contiguous().view(torch.uint64)
    probs = probs * _kept(state, probs, dropout_p)
    out = _tokens_first(probs @ _heads_first(v, q.shape[-2])).view(q.shape).to(q.dtype)
    out = out.masked_fill(~written[:, None, None], math.nan)
    lse = lse.masked_fill(is_empty, math.inf)  # of a query that sees no key
    unused = torch.zeros((), dtype=torch.uint64, device=q.device)
    return out, lse if cum_q is None else lse[0], state, unused, q.new_empty(0)


def _flash_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cum_q: Tensor | None,
    cum_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    seed: Tensor,
    unused: Tensor,
    *,
    scale: float,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, ...]:
    _check_flash(q, k, v, cum_q, cum_k)
    assert q.dtype == grad.dtype == out.dtype, "the kernel reads all of them as one dtype"
    assert q.shape == grad.shape == out.shape
    assert seed.dtype == torch.uint64, "the state of dropout that forward returned"
    assert seed.shape == (2,)
    rows = q.shape[:-1] if cum_q is None else (1, *q.shape[:-1])  # [b, q, n]
    of_rows = (rows[0], rows[2], rows[1])
    assert lse.shape == (of_rows if cum_q is None else of_rows[1:])
    # The kernel reads its memory as packed rows [b, n, q], whatever the strides say.
    assert lse.dtype == torch.float32, "a GPU's flash kernel keeps its logarithms in fp32"
    assert lse.is_contiguous(), "flash attention's backward pass reads a packed log-sum-exp"
    window = (window_size_left, 0 if is_causal else window_size_right)
    seen, written = _seen(q, k, cum_q, (max_q, max_k), window)
    heads, groups = q.shape[-2], k.shape[-2]
    log_sums = lse if cum_q is None else lse.unsqueeze(0)
    grads, outs = (_heads_first(x, heads) for x in (grad, out))
    probs = (_scores(q, k, scale) - log_sums.unsqueeze(-1)).exp().masked_fill(~seen, 0)
    along = (grads * outs).sum(-1, keepdim=True)
    kept = _kept(seed, probs, dropout_p)
    grad_scores = probs * (grads @ _heads_first(v, heads).mT * kept - along) * scale
    dq = grad_scores @ _heads_first(k, heads)
    dk = grad_scores.mT @ _heads_first(q, heads)
    dv = (probs * kept).mT @ grads
    dk, dv = (x.unflatten(1, (groups, -1)).sum(2) for x in (dk, dv))
    of_all = zip((dq, dk, dv), (q, k, v), strict=True)
    dq, dk, dv = (_tokens_first(x).view(like.shape).to(like.dtype) for x, like in of_all)
    if cum_q is None:
        return dq, dk, dv
    return tuple(x.masked_fill(~written[:, None, None], math.nan) for x in (dq, dk, dv))


def _check_flash(
    q: Tensor, k: Tensor, v: Tensor, cum_q: Tensor | None, cum_k: Tensor | None
) -> None:
    for tensor in (q, k, v):
        if tensor.dtype not in _HALF:
            raise RuntimeError("flash attention only supports fp16 and bf16")
        assert tensor.dim() == (4 if cum_q is None else 3)
        assert tensor.stride(-1) == 1, "flash attention reads heads of adjacent values"
        assert tensor.shape[-1] % 8 == 0, "the kernel reads 8 values at once"
        assert tensor.shape[-1] <= 256, "flash attention has heads of at most 256"
        steps = [n for n, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
        places = (*steps[:-1], tensor.storage_offset())
        assert all(n % 8 == 0 for n in places), "the kernel reads 16 bytes at once"
    assert q.dtype == k.dtype == v.dtype
    assert q.shape[-1] == k.shape[-1] == v.shape[-1], "values are as wide as keys"
    assert k.shape == v.shape
    assert q.shape[-2] % k.shape[-2] == 0
    assert (cum_q is None) == (cum_k is None)
    for bounds in (cum_q, cum_k):
        if bounds is not None:
            assert bounds.dim() == 1
            assert bounds.dtype == torch.int32
            assert bounds.is_contiguous()
            assert bounds.is_cuda


def _seen(
    q: Tensor,
    k: Tensor,
    bounds: Tensor | None,
    longest: tuple[int, int],
    window: tuple[int | None, int | None],
) -> tuple[Tensor, Tensor]:
    """Which keys a query sees [q, k]; and the queries [q] that the kernel computes.

    ``bounds`` of the device are not read by the host, which would be counted as a wait.
    """
    places = [torch.arange(x.shape[-3], device=q.device) for x in (q, k)]
    written = torch.ones_like(places[0], dtype=torch.bool)
    same = torch.ones(len(places[0]), len(places[1]), dtype=torch.bool, device=q.device)
    if bounds is None:
        assert longest == (q.shape[1], k.shape[1])
        places[0] = places[0] + len(places[1]) - len(places[0])
    else:
        assert len(q) == len(k)
        index = torch.searchsorted(bounds, places[0].int(), right=True) - 1
        same = index.unsqueeze(1) == index
        index = index.clamp(max=len(bounds) - 2)
        written = (places[0] < bounds[-1]) & (places[0] - bounds[index] < min(longest))
    distance = places[0].unsqueeze(1) - places[1]
    left, right = (-1 if side is None else side for side in window)
    if left >= 0:
        same = same & (distance <= left)
    if right >= 0:
        same = same & (-distance <= right)
    return same, written


def _heads_first(x: Tensor, num_heads: int) -> Tensor:
    """[b, s, g, d] or [t, g, d] -> float32 [b or 1, n, s or t, d]."""
    x = (x if x.dim() == 4 else x.unsqueeze(0)).float().transpose(1, 2)
    return x.repeat_interleave(num_heads // x.shape[1], 1)


def _tokens_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous()


def _scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    heads = q.shape[-2]
    return _heads_first(q, heads) @ _heads_first(k, heads).mT * scale


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
    _check_efficient(q, k, v)
    assert bias is None
    seed = _seed(q, dropout_p)
    if dropout_p:
        probs, lse = _probabilities(q, k, is_causal, scale)
        out = (probs * _kept(seed, probs, dropout_p) @ v.float()).to(q.dtype)
    else:
        out, lse = _forward(q, k, v, is_causal, scale)
    return out, F.pad(lse, (0, -lse.shape[-1] % _ROWS)), seed, torch.zeros_like(seed)


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
    _check_efficient(q, k, v)
    assert grad.dtype == out.dtype == q.dtype
    assert grad.shape == out.shape == (*q.shape[:3], v.shape[-1])
    assert lse.dtype == torch.float32, "efficient attention keeps its logarithms in fp32"
    assert lse.shape == (*q.shape[:2], q.shape[2] + -q.shape[2] % _ROWS)
    if q.dtype in _HALF:
        # The kernel computes sum(grad * out) itself there, and ignores the strides of the output.
        assert out.transpose(1, 2).is_contiguous(), "efficient attention reads a dense output"
    rows = lse[..., : q.shape[2]].contiguous()
    if not dropout_p:
        return *_backward(grad, q, k, v, out, rows, is_causal, scale), None
    # Of merged blocks, ``out`` and ``lse`` are of more keys than these.
    scores = _masked_scores(q, k, is_causal, scale)
    probs = (scores - rows.unsqueeze(-1)).exp()
    kept = _kept(seed, probs, dropout_p)
    along = (grad.float() * out.float()).sum(-1, keepdim=True)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    of_scores = probs * (grad.float() @ v.float().mT * kept - along) * factor
    grads = of_scores @ k.float(), of_scores.mT @ q.float(), (probs * kept).mT @ grad.float()
    return *(torch.empty_like(x).copy_(g) for g, x in zip(grads, (q, k, v), strict=True)), None


def _check_efficient(q: Tensor, k: Tensor, v: Tensor) -> None:
    for x in (q, k, v):
        assert x.dtype == q.dtype
        assert x.dtype in (*_HALF, torch.float32), "efficient attention has no other dtype"
        assert x.stride(-1) == 1, "efficient attention reads heads of adjacent values"
        unit = 16 // x.element_size()
        steps = [n for n, size in zip(x.stride(), x.shape, strict=True) if size > 1]
        places = (*steps[:-1], x.storage_offset(), x.shape[-1])
        assert all(n % unit == 0 for n in places), "torch pads or copies what is not aligned"


def _cudnn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """Emulate cuDNN, [b, n, s, d]: values may be narrower than keys."""
    _check_cudnn(q, k, v)
    assert compute_log_sumexp, "backward reads the log-sum-exp"
    assert bias is None
    assert dropout_p == 0
    assert not return_debug_mask
    assert scale is not None
    k, v = (_for_each_head(x, q.shape[1]) for x in (k, v))
    probs, lse = _probabilities(q, k, is_causal, scale)
    order = sorted(range(4), key=lambda dim: -q.stride(dim))  # the output has that of queries
    places = sorted(range(4), key=lambda at: order[at])
    out = (probs @ v.float()).to(q.dtype).permute(order).contiguous().permute(places)
    seed = torch.zeros((), dtype=torch.int64, device=q.device)
    return out, lse.unsqueeze(-1), None, None, q.shape[2], k.shape[2], seed, seed, None


def _cudnn_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    seed: Tensor,
    offset: Tensor,
    bias: Tensor | None,
    cum_q: Tensor | None,
    cum_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    assert scale is not None
    _check_cudnn(q, k, v)
    assert grad.shape == out.shape == (*q.shape[:3], v.shape[-1])
    assert lse.shape == (*q.shape[:3], 1)
    assert lse.is_contiguous()
    groups = k.shape[1]
    k, v = (_for_each_head(x, q.shape[1]) for x in (k, v))
    # Of merged blocks, ``out`` and ``lse`` are of more keys than these.
    probs = (_masked_scores(q, k, is_causal, scale) - lse).exp()
    along = (grad.float() * out.float()).sum(-1, keepdim=True)
    scores = probs * (grad.float() @ v.float().mT - along) * scale
    dq, dk, dv = scores @ k.float(), scores.mT @ q.float(), probs.mT @ grad.float()
    dk, dv = (x.unflatten(1, (groups, -1)).sum(2) for x in (dk, dv))
    return tuple(x.to(q.dtype) for x in (dq, dk, dv))


def _for_each_head(x: Tensor, heads: int) -> Tensor:
    return x.repeat_interleave(heads // x.shape[1], 1)


def _probabilities(
    q: Tensor, k: Tensor, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    scores = _masked_scores(q, k, is_causal, scale)
    return scores.softmax(-1), scores.logsumexp(-1)


def _masked_scores(q: Tensor, k: Tensor, is_causal: bool, scale: float | None) -> Tensor:
    scores = q.float() @ k.float().mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    return scores


def _seed(like: Tensor, dropout_p: float) -> Tensor:
    """Draw the state of dropout from the device's generator."""
    if not dropout_p:
        return torch.zeros((), dtype=torch.int64, device=like.device)
    return torch.randint(2**62, (), device=like.device)


def _kept(state: Tensor, probs: Tensor, dropout_p: float) -> Tensor | float:
    """Return the factors of dropout for a state that forward returned."""
    if not dropout_p:
        return 1.0
    generator = torch.Generator().manual_seed(int(state.view(torch.int64).flatten()[0]))
    mask = torch.rand(probs.shape, generator=generator) >= dropout_p
    return mask.to(probs.device).to(probs.dtype) / (1 - dropout_p)


def _check_cudnn(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Assert what torch's check asserts on Hopper with cuDNN 9.10 or newer."""
    assert q.shape[0] == k.shape[0]
    assert q.shape[1] % k.shape[1] == 0
    assert k.shape[:2] == v.shape[:2]
    assert k.shape[2] == v.shape[2] > 1
    assert q.shape[-1] == k.shape[-1], "queries and keys are multiplied"
    for x in (q, k, v):
        if x.dtype not in _HALF:
            raise RuntimeError("cuDNN attention only supports fp16 and bf16")
        assert x.stride(-1) == 1, "cuDNN reads heads of adjacent values"
        assert x.shape[-1] % 8 == 0, "cuDNN has heads of a multiple of 8"
        assert x.shape[-1] <= 256, "cuDNN has heads of at most 256"


def _forward(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
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
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, ...]:
    kernel = _aten._scaled_dot_product_flash_attention_for_cpu_backward
    result: tuple[Tensor, ...] = kernel(grad, q, k, v, out, lse, 0.0, is_causal, scale=scale)
    return result
