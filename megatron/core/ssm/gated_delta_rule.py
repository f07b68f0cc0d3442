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

from megatron.core import device
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

    q and k [s, b, g, k], v [s, b, h, v], g <= 0 and beta > 0 [s, b, h].  ``state`` [b, h, k, v]:
    state before the first token (default: zeros).  ``sequence`` [s]: index of each token's packed
    sequence; the first one starts from ``state``, the others from zeros.  ``chunk_size``: a power
    of 2.

    Returns o [s, b, h, v] in the dtype of v, and the state [b, h, k, v] after the last token.
    """
    wide = torch.promote_types(v.dtype, torch.float32)
    s, b, groups = k.shape[:3]
    length = min(chunk_size, 1 << (s - 1).bit_length())
    heads = v.unflatten(2, (groups, -1))  # [s, b, g, r, v]
    rates = (x.unflatten(2, (groups, -1)) for x in (g, beta))
    inputs = [_in_chunks(x.to(wide), length) for x in (q, k, heads, *rates)]
    places = None
    if sequence is not None:
        places = torch.cat([sequence, sequence[-1:].expand(-s % length)]).view(-1, length)
    if state is None:
        state = v.new_zeros(b, v.shape[2], k.shape[3], v.shape[3], dtype=wide)
    state = state.to(wide).unflatten(1, (groups, -1))
    if device.is_cuda(v.device):
        # [c, l, b, g, ..] -> [c, b, g, l, ..]
        moved = (x.movedim(1, 3).contiguous() for x in inputs)
        o, last = _Rule.apply(*moved, state, places)
        o = o.movedim(3, 1)
    else:
        # Group by group the tensors of a chunk fit a CPU's cache, and views need no copies.
        per_group = zip(
            *(x.flatten(2, 3).unbind(2) for x in inputs), state.flatten(0, 1), strict=True
        )
        outputs, states = zip(*(_Rule.apply(*of_one, places) for of_one in per_group), strict=True)
        o, last = torch.stack(outputs, 2), torch.stack(states)
    return o.reshape(-1, *v.shape[1:])[:s].to(v.dtype), last.view(b, -1, *last.shape[-2:])


def _in_chunks(x: Tensor, length: int) -> Tensor:
    """Split the tokens into chunks: [s, ..] -> [c, l, ..]; padding has beta 0: no effect."""
    missing = -len(x) % length
    if missing:
        x = F.pad(x, (0, 0) * (x.dim() - 1) + (0, missing))
    chunks: Tensor = x.unflatten(0, (-1, length))
    return chunks


class _Rule(Function[Pair]):
    """The rule over q, k [c, .., l, k], v, o [c, .., l, r, v] and g, beta [c, .., l, r].

    ``state`` [.., r, k, v]; ``places`` [c, l]: index of each token's sequence.  Only the states
    before chunks pass from chunk to chunk, here as [.., k, r v]: one matmul for all heads of a
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
        decays = _Decays(cumulative_sum(g, -2), places, v.shape[-1])
        S = state.transpose(-3, -2).flatten(-2)
        system = (_heads(beta) * (k @ k.mT).unsqueeze(-3)).mul_(decays.within).tril_(-1)
        Tb = _inverse(system).mul_(beta.mT.unsqueeze(-2))
        entering = S.new_empty(len(v), *S.shape)
        rest, made = (torch.empty_like(v, memory_format=torch.contiguous_format) for _ in range(2))
        for i in range(len(v)):
            entering[i] = S
            found = (k[i] @ S).view(v[i].shape)
            torch.addcmul(v[i], found, decays.start[i], value=-1, out=rest[i])
            made[i] = _swap(Tb[i] @ _swap(rest[i]))
            added = k[i].mT @ (made[i] * decays.left[i]).flatten(-2)
            S = torch.addcmul(added, decays.keep[i], S)
        o = (q @ entering).view(v.shape).mul_(decays.start)
        o += _swap(decays.within.mul_((q @ k.mT).unsqueeze(-3)) @ _swap(made))
        last = S.unflatten(-1, v.shape[-2:]).transpose(-3, -2).contiguous()
        saved = (q, k, v, g, beta, Tb, entering, rest, o, last)
        ctx.save_for_backward(*saved, *(() if places is None else (places,)))
        return o, last

    @staticmethod
    def backward(ctx: Context[None], *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, g, beta, Tb, entering, rest, o, last, *places = ctx.saved_tensors
        do, d_last = grads
        decays = _Decays(cumulative_sum(g, -2), places[0] if places else None, v.shape[-1])
        made = _swap(Tb @ _swap(rest)).contiguous()
        seen = decays.within * (q @ k.mT).unsqueeze(-3)
        d_made = _swap(seen.mT @ _swap(do)).contiguous()
        read = (do * decays.start).flatten(-2)  # gradient of q S
        d_states = q.mT @ read
        after = torch.empty_like(entering)  # gradient of the state after each chunk
        d_rest, started = (torch.empty_like(made) for _ in range(2))
        dS = d_last.transpose(-3, -2).flatten(-2)
        for i in reversed(range(len(v))):
            after[i] = dS
            d_made[i].addcmul_((k[i] @ dS).view(v[i].shape), decays.left[i])
            d_rest[i] = _swap(Tb[i].mT @ _swap(d_made[i]))
            back = k[i].mT @ torch.mul(d_rest[i], decays.start[i], out=started[i]).flatten(-2)
            dS = torch.addcmul(d_states[i], decays.keep[i], dS).sub_(back)

        # Gradients of K K^T and Q K^T of a group are sums over its heads.
        d_system = (_swap(d_rest) @ _swap(made).mT).mul_(decays.within).tril_(-1).neg_()
        d_seen = (_swap(do) @ _swap(made).mT).mul_(decays.within).sum(-3)
        products = (k @ k.mT).unsqueeze(-3)
        # A rate of 0 is one that a sigmoid has rounded, whose gradient is 0 too.
        smallest = torch.finfo(beta.dtype).tiny
        d_beta = (d_rest * rest).sum(-1).add_((d_system * products).sum(-1).mT)
        d_beta /= beta.clamp_min(smallest)
        d_keys = d_system.sum(-3)
        dq = d_seen @ k + read @ entering.mT
        dk = (d_keys + d_keys.mT) @ k + d_seen.mT @ q
        dk -= started.flatten(-2) @ entering.mT
        dk += (made * decays.left).flatten(-2) @ after.mT

        da = (o * do).addcmul_(v, d_rest, value=-1).sum(-1)
        leaving = torch.cat([entering[1:], last.transpose(-3, -2).flatten(-2)[None]])
        da[..., -1, :] += (after * leaving).unflatten(-1, v.shape[-2:]).sum((-3, -1))
        dg = cumulative_sum(da.flip(-2), -2).flip(-2)
        d_state = dS.unflatten(-1, v.shape[-2:]).transpose(-3, -2)
        return dq, dk, d_rest, dg, d_beta, d_state, None


class _Decays:
    """Decays within a chunk, from its start, to its end and over it, for a [c, .., l, r].

    They are 0 between tokens of different sequences.  ``width``: that of values.
    """

    def __init__(self, a: Tensor, places: Tensor | None, width: int) -> None:
        over = a.mT
        to_end = a[..., -1:, :] - a
        # What overflows is above the diagonal.
        within = (over[..., :, None] - over[..., None, :]).exp_().tril_()
        if places is not None:
            apart = places[:, :, None] != places[:, None, :]
            before = torch.cat([places[:1, 0], places[:-1, -1]])
            lead = (slice(None), *[None] * (a.dim() - 3))  # over what lies between c and l
            within.masked_fill_(apart[lead].unsqueeze(-3), 0)
            to_end = to_end.masked_fill(apart[:, -1][lead].unsqueeze(-1), -math.inf)
            a = a.masked_fill((places != before[:, None])[lead].unsqueeze(-1), -math.inf)
        self.within = within  # [c, .., r, l, l]
        self.start = a.exp().unsqueeze(-1)  # [c, .., l, r, 1]
        self.left = to_end.exp().unsqueeze(-1)
        last = self.start[..., -1, :, :]
        self.keep = last.expand(*last.shape[:-1], width).flatten(-2).unsqueeze(-2)  # [.., 1, r v]


def _heads(beta: Tensor) -> Tensor:
    """Return the factors of rows of [c, .., r, l, l]: [c, .., l, r] -> [c, .., r, l, 1]."""
    return beta.mT.unsqueeze(-1)


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
