"""The state-space recurrence of Mamba-2 (arXiv 2405.21060), computed in chunks.

``s`` tokens, ``b`` sequences, ``h`` heads, ``p`` head width, ``g`` groups, ``n`` state width; the
r = h/g heads of a group share B and C.  For each head, with a state S [p, n]:

    S_t = exp(dt_t A) S_{t-1} + dt_t x_t B_t^T          y_t = S_t C_t + D x_t

Within a chunk of ``l`` tokens, y is attention with decaying weights in place of a softmax,
y_i = sum over j <= i of (C_i B_j) exp(a_i - a_j) dt_j x_j, with a the cumulative sum of dt A.  From
one of the ``c`` chunks to the next, only S is passed.  Decays and states are in float32 at least.
On a GPU kernels compute the same (`fusions.triton.scan`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core import device
from megatron.core.autograd import Context, Function
from megatron.core.device.determinism import cumulative_sum
from megatron.core.fusions import kernels

# Elements of the [l, l] weight matrices that are computed at a time; on a CPU they fit its cache.
_AT_ONCE_CPU = 1 << 17
_AT_ONCE_GPU = 1 << 28


def chunked_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    state: Tensor | None = None,
    sequence: Tensor | None = None,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor]:
    """Compute the recurrence with matmuls over chunks; backward recomputes weights within chunks.

    x [s, b, h, p], dt [s, b, h] > 0, A [h] < 0, B and C [s, b, g, n], D [h].  ``state``
    [b, h, p, n]: state before the first token (default: zeros).  ``sequence`` [s]: index of each
    token's packed sequence; the first one starts from ``state``, the others from zeros.

    Returns y [s, b, h, p] in the dtype of x, and the state [b, h, p, n] after the last token.  On a
    GPU, kernels have chunks of their own size.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    (s, b, h, p), (g, n) = x.shape, B.shape[2:]
    if fused := _kernels(x, B, C):
        length = fused.length(x)
        steps = F.pad(dt.to(wide), (0, 0, 0, 0, 0, -s % length)).unflatten(0, (-1, length))
        steps = steps.permute(0, 2, 3, 1)
        steps = torch.stack([steps, cumulative_sum(steps * A.to(wide)[:, None], 3)])
        places = None if sequence is None else _in_chunks(sequence, length)
        both: tuple[Tensor, Tensor] = fused.scan(x, steps, B, C, D, state, places)
        return both
    length = min(chunk_size, s)

    def chunks(m: Tensor, *heads: int) -> Tensor:
        """Split into chunks: [s, b, ...] -> [c, b, g, l, ...]; padding has dt 0, so no effect."""
        m = F.pad(m, (0, 0) * (m.dim() - 1) + (0, -s % length)) if s % length else m
        m = m.reshape(-1, length, b, g, *heads)
        return m.permute(0, 2, 3, 1, *range(4, m.dim()))

    steps, xs = chunks(dt.to(wide), h // g), chunks(x, h // g, p)  # [c, b, g, l, r], [.., r, p]
    a = cumulative_sum(steps * A.to(wide).view(g, 1, -1), 3)
    Bs, Cs = chunks(B, n), chunks(C, n)  # [c, b, g, l, n]
    places = None
    if sequence is not None:
        places = _in_chunks(sequence, length)
    y = _WithinChunks.apply(Cs, Bs, xs * steps[..., None].to(x.dtype), a, places)

    left = a[:, :, :, -1:] - a
    start = a
    # Only tokens of the last sequence of a chunk add to the state after it; only tokens of the
    # sequence that continues from the previous chunk read the state before it.
    if places is not None:
        before = torch.cat([places[:1, 0], places[:-1, -1]])
        left = left.masked_fill(_over_heads(places != places[:, -1:]), -math.inf)
        start = start.masked_fill(_over_heads(places != before[:, None]), -math.inf)
    weights = (steps * left.exp()).to(x.dtype)  # round the product, not its factors
    weighted = (xs * weights[..., None]).flatten(4)  # [c, b, g, l, (r p)]
    made = (weighted.transpose(-1, -2) @ Bs).to(wide)  # [c, b, g, (r p), n]
    kept = start[:, :, :, -1].exp()[..., None].expand(*a.shape[:3], h // g, p).flatten(3)[..., None]
    S = x.new_zeros(b, g, h // g * p, n, dtype=wide)
    S = S if state is None else state.to(wide).reshape(S.shape)
    entering = []
    for keep, new in zip(kept, made, strict=True):
        entering.append(S)
        S = torch.addcmul(new, keep, S)
    seen = Cs @ torch.stack(entering).to(x.dtype).transpose(-1, -2)  # [c, b, g, l, (r p)]
    y = torch.addcmul(y, seen.view(y.shape), start.exp()[..., None].to(x.dtype))
    y = y.permute(0, 3, 1, 2, 4, 5).reshape(-1, b, h, p)[:s]
    return y if D is None else torch.addcmul(y, x, D.to(x.dtype)[:, None]), S.view(b, h, p, n)


def _kernels(x: Tensor, B: Tensor, C: Tensor) -> ModuleType | None:
    if not x.numel() or x.dtype != B.dtype or x.dtype != C.dtype:
        return None
    fused = kernels.find("scan", x, B, C)
    return fused if fused and fused.takes(x, B.shape[3]) else None


def _in_chunks(sequence: Tensor, length: int) -> Tensor:
    """Split the sequence of each token into chunks; padding belongs to the last sequence."""
    return torch.cat([sequence, sequence[-1:].expand(-len(sequence) % length)]).view(-1, length)


def _over_heads(mask: Tensor) -> Tensor:
    """Insert dimensions for sequences, groups and heads: [c, l] -> [c, 1, 1, l, 1]."""
    return mask[:, None, None, :, None]


class _WithinChunks(Function[Tensor]):
    """y_i = sum over j <= i of (C_i B_j) exp(a_i - a_j) x_j, in each chunk and head.

    C and B [c, b, g, l, n], x and y [c, b, g, l, r, p], a [c, b, g, l, r] not increasing along l.
    ``places`` [c, l]: index of each token's sequence; tokens of different sequences do not
    interact.  Backward recomputes the weights.
    """

    @staticmethod
    def forward(
        ctx: Context[None], C: Tensor, B: Tensor, x: Tensor, a: Tensor, places: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(C, B, x, a, *(() if places is None else (places,)))
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        for at in _blocks(a):
            weights = _decays(a[at], None if places is None else places[at])
            weights.mul_((C[at] @ B[at].transpose(-1, -2)).unsqueeze(3))
            y[at] = (weights.to(x.dtype) @ x[at].transpose(3, 4)).transpose(3, 4)
        return y

    @staticmethod
    def backward(ctx: Context[None], grad: Tensor) -> tuple[Tensor | None, ...]:
        C, B, x, a, *rest = ctx.saved_tensors
        dC, dB = (torch.empty(m.shape, dtype=m.dtype, device=m.device) for m in (C, B))
        dx, da = (torch.empty(m.shape, dtype=m.dtype, device=m.device) for m in (x, a))
        for at in _blocks(a):
            decays = _decays(a[at], rest[0][at] if rest else None)  # [c, b, g, r, l, l]
            dy = grad[at].transpose(3, 4)
            d_weights = decays * (dy @ x[at].transpose(3, 4).transpose(-1, -2))
            products = C[at] @ B[at].transpose(-1, -2)  # [c, b, g, l, l]
            weights = decays.mul_(products.unsqueeze(3))
            dx[at] = (weights.to(x.dtype).transpose(-1, -2) @ dy).transpose(3, 4)
            d_products = d_weights.sum(3).to(C.dtype)
            dC[at] = d_products @ B[at]
            dB[at] = d_products.transpose(-1, -2) @ C[at]
            d_logs = d_weights.mul_(products.unsqueeze(3))
            da[at] = (d_logs.sum(-1) - d_logs.sum(-2)).transpose(3, 4)
        return dC, dB, dx, da, None


def _blocks(a: Tensor) -> Iterator[slice]:
    """Yield slices of chunks whose weight matrices are in memory at a time."""
    size = math.prod(a.shape[1:]) * a.shape[3]
    limit = _AT_ONCE_GPU if device.is_cuda(a.device) else _AT_ONCE_CPU
    step = max(1, limit // max(size, 1))
    for start in range(0, a.shape[0], step):
        yield slice(start, start + step)


def _decays(a: Tensor, places: Tensor | None) -> Tensor:
    """Return the decays exp(a_i - a_j), 0 for j > i: [c, b, g, l, r] -> [c, b, g, r, l, l].

    They are also 0 between tokens of different sequences.
    """
    a = a.transpose(3, 4)
    length = a.shape[-1]
    later = torch.ones(length, length, dtype=torch.bool, device=a.device).triu_(1)
    if places is not None:
        apart = places[:, :, None] != places[:, None, :]
        later = (later | apart)[:, None, None, None]
    return (a[..., :, None] - a[..., None, :]).masked_fill_(later, -math.inf).exp_()
