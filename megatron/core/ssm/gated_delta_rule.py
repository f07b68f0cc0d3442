"""The gated delta rule (arXiv 2412.06464), computed in chunks.

``s`` tokens, ``b`` sequences, ``g`` key heads of width ``k``, ``h`` = g r value heads of width
``v``; the r value heads of a group share queries and keys.  For each head, with a state S [k, v]:

    S_t = exp(g_t) S_{t-1} + k_t b_t (v_t - exp(g_t) S_{t-1}^T k_t)^T          o_t = S_t^T q_t

Within a chunk of ``l`` tokens, with a the cumulative sum of g, D_ij = exp(a_i - a_j) for j <= i,
and S the state before the chunk, the corrections are C = T b (V - exp(a) K S), where T is the
inverse of 1 + the strictly lower part of b (K K^T) D (the WY representation).  Then

    O = exp(a) Q S + ((Q K^T) D) C          S' = exp(a_l) S + K^T exp(a_l - a) C

Backward needs no gradients of exponents one by one: a decay multiplies each path from a value to an
output, so the gradient of a_i is o_i . do_i - v_i . dv_i, plus that of the state after the chunk.
Everything is computed in float32 at least.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.autograd import Context, Function
from megatron.core.device.determinism import cumulative_sum

Pair = tuple[Tensor, Tensor]


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    state: Tensor | None = None,
    sequence: Tensor | None = None,
    chunk_size: int = 64,
) -> Pair:
    """Compute the rule with matmuls over chunks.

    q and k [s, b, g, k], v [s, b, h, v], g <= 0 and beta [s, b, h].  ``state`` [b, h, k, v]: state
    before the first token (default: zeros).  ``sequence`` [s]: index of each token's packed
    sequence; the first one starts from ``state``, the others from zeros.  ``chunk_size``: a power
    of 2.

    Returns o [s, b, h, v] in the dtype of v, and the state [b, h, k, v] after the last token.
    """
    wide = torch.promote_types(v.dtype, torch.float32)
    s, b, groups = k.shape[:3]
    heads = v.shape[2] // groups
    length = min(chunk_size, 1 << (s - 1).bit_length())

    def chunks(x: Tensor, *sizes: int) -> Tensor:
        """Split into chunks: [s, b, ...] -> [c, b, g, l, ...]; padding has beta 0: no effect."""
        x = F.pad(x, (0, 0) * (x.dim() - 1) + (0, -s % length)) if s % length else x
        x = x.to(wide).reshape(-1, length, b, groups, *sizes)
        return x.permute(0, 2, 3, 1, *range(4, x.dim())).contiguous()

    places = None
    if sequence is not None:
        places = torch.cat([sequence, sequence[-1:].expand(-s % length)]).view(-1, length)
    if state is None:
        state = v.new_zeros(b, heads * groups, k.shape[3], v.shape[3], dtype=wide)
    o, state = _Rule.apply(
        chunks(q, k.shape[3]),
        chunks(k, k.shape[3]),
        chunks(v, heads, v.shape[3]),
        chunks(g, heads),
        chunks(beta, heads),
        state.to(wide).unflatten(1, (groups, heads)),
        places,
    )
    o = o.permute(0, 3, 1, 2, 4, 5).reshape(-1, b, *v.shape[2:])[:s]
    return o.to(v.dtype), state.flatten(1, 2)


class _Rule(Function[Pair]):
    """The rule over q, k [c, b, g, l, k], v, o [c, b, g, l, r, v] and g, beta [c, b, g, l, r].

    ``state`` [b, g, r, k, v]; ``places`` [c, l]: index of each token's sequence.  Only the states
    before chunks pass from chunk to chunk, here as [b, g, k, r v]: one matmul for all heads of a
    group.
    """

    @staticmethod
    def forward(
        ctx: Context[None],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        state: Tensor,
        places: Tensor | None,
    ) -> Pair:
        decays = _Decays(cumulative_sum(g, 3), places, v.shape[5])
        S = state.transpose(2, 3).flatten(3)
        T = _inverse((_heads(beta) * (k @ k.mT).unsqueeze(3) * decays.within).tril(-1))
        entering = S.new_empty(len(v), *S.shape)
        rest, made = (torch.empty_like(v, memory_format=torch.contiguous_format) for _ in range(2))
        for i in range(len(v)):
            entering[i] = S
            found = (k[i] @ S).view(v[i].shape)
            torch.addcmul(v[i], found, decays.start[i], value=-1, out=rest[i])
            made[i] = _swap(T[i] @ _swap(rest[i] * beta[i].unsqueeze(-1)))
            S = decays.keep[i] * S + k[i].mT @ (made[i] * decays.left[i]).flatten(3)
        o = (q @ entering).view(v.shape).mul_(decays.start)
        o += _swap((decays.within * (q @ k.mT).unsqueeze(3)) @ _swap(made))
        last = S.unflatten(3, state.shape[2::2]).transpose(2, 3).contiguous()
        saved = (q, k, v, g, beta, T, entering, rest, o, last)
        ctx.save_for_backward(*saved, *(() if places is None else (places,)))
        return o, last

    @staticmethod
    def backward(ctx: Context[None], *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, g, beta, T, entering, rest, o, last, *places = ctx.saved_tensors
        do, d_last = grads
        decays = _Decays(cumulative_sum(g, 3), places[0] if places else None, v.shape[5])
        rates = beta.unsqueeze(-1)
        made = _swap(T @ _swap(rest * rates))
        seen = decays.within * (q @ k.mT).unsqueeze(3)
        d_made = _swap(seen.mT @ _swap(do))
        read = (do * decays.start).flatten(4)  # gradient of q S
        d_states = q.mT @ read
        after = torch.empty_like(entering)  # gradient of the state after each chunk
        d_rest, d_written = (torch.empty_like(made) for _ in range(2))
        dS = d_last.transpose(2, 3).flatten(3)
        for i in reversed(range(len(v))):
            after[i] = dS
            d_made[i].addcmul_((k[i] @ dS).view(v[i].shape), decays.left[i])
            d_written[i] = _swap(T[i].mT @ _swap(d_made[i]))
            torch.mul(d_written[i], rates[i], out=d_rest[i])
            back = k[i].mT @ (d_rest[i] * decays.start[i]).flatten(3)
            dS = torch.addcmul(d_states[i], decays.keep[i], dS).sub_(back)

        # Gradients of K K^T and Q K^T of a group are sums over its heads.
        d_system = (_swap(d_written) @ _swap(made).mT).mul_(decays.within).tril_(-1).neg_()
        d_seen = (_swap(do) @ _swap(made).mT).mul_(decays.within).sum(3)
        products = (k @ k.mT).unsqueeze(3)
        d_beta = (d_written * rest).sum(-1) + (d_system * products).sum(-1).transpose(3, 4)
        d_keys = (d_system * _heads(beta)).sum(3)
        dq = d_seen @ k + read @ entering.mT
        dk = (d_keys + d_keys.mT) @ k + d_seen.mT @ q
        dk -= (d_rest * decays.start).flatten(4) @ entering.mT
        dk += (made * decays.left).flatten(4) @ after.mT

        da = (o * do - v * d_rest).sum(-1)
        leaving = torch.cat([entering[1:], last.transpose(2, 3).flatten(3)[None]])
        da[:, :, :, -1] += (after * leaving).unflatten(-1, v.shape[4:]).sum((3, 5))
        dg = cumulative_sum(da.flip(3), 3).flip(3)
        d_state = dS.unflatten(3, v.shape[4:]).transpose(2, 3)
        return dq, dk, d_rest, dg, d_beta, d_state, None


class _Decays:
    """Decays within a chunk, from its start, to its end and over it, for a [c, b, g, l, r].

    They are 0 between tokens of different sequences.  ``width``: that of values.
    """

    def __init__(self, a: Tensor, places: Tensor | None, width: int) -> None:
        over = a.transpose(3, 4)
        to_end = a[:, :, :, -1:] - a
        # What overflows is above the diagonal.
        within = (over[..., :, None] - over[..., None, :]).exp_().tril_()
        if places is not None:
            apart = places[:, :, None] != places[:, None, :]
            within.masked_fill_(apart[:, None, None, None], 0)
            before = torch.cat([places[:1, 0], places[:-1, -1]])
            to_end = to_end.masked_fill(_per_token(apart[:, -1]), -math.inf)
            a = a.masked_fill(_per_token(places != before[:, None]), -math.inf)
        self.within = within  # [c, b, g, r, l, l]
        self.start = a.exp().unsqueeze(-1)  # [c, b, g, l, r, 1]
        self.left = to_end.exp().unsqueeze(-1)
        keep = self.start[:, :, :, -1].expand(-1, -1, -1, -1, width)
        self.keep = keep.flatten(3).unsqueeze(3)  # [c, b, g, 1, r v], of states


def _per_token(mask: Tensor) -> Tensor:
    """Insert dimensions for sequences, groups and heads: [c, l] -> [c, 1, 1, l, 1]."""
    return mask[:, None, None, :, None]


def _heads(beta: Tensor) -> Tensor:
    """Return the factors of rows of [c, b, g, r, l, l]: [c, b, g, l, r] -> [c, b, g, r, l, 1]."""
    return beta.transpose(3, 4).unsqueeze(-1)


def _swap(x: Tensor) -> Tensor:
    """Swap tokens and heads: [.., l, r, v] -> [.., r, l, v] and back."""
    return x.transpose(-3, -2)


def _inverse(lower: Tensor) -> Tensor:
    """Return the inverse of 1 + ``lower`` [.., l, l], strictly lower triangular; l a power of 2.

    Blocks of 1, 2, 4, ... rows are inverted in turn: [[A, 0], [C, B]] has the inverse
    [[A^-1, 0], [-B^-1 C A^-1, B^-1]].  torch's triangular solver takes matrix after matrix.
    """
    length = lower.shape[-1]
    blocks = lower.new_ones(*lower.shape[:-1], 1, 1)  # [.., number of blocks, rows, rows]
    while (rows := blocks.shape[-1]) < length:
        at = lower.unflatten(-1, (-1, 2, rows)).unflatten(-4, (-1, 2, rows))
        C = at[..., 1, :, :, 0, :].diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
        A, B = blocks[..., 0::2, :, :], blocks[..., 1::2, :, :]
        whole = lower.new_zeros(*A.shape[:-2], 2 * rows, 2 * rows)
        whole[..., :rows, :rows] = A
        whole[..., rows:, rows:] = B
        whole[..., rows:, :rows] = -(B @ C @ A)
        blocks = whole
    return blocks.squeeze(-3)
