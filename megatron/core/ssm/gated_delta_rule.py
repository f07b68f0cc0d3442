"""The gated delta rule with a decay per head (arXiv 2412.06464) or channel (KDA, arXiv 2510.26692).

``s`` tokens, ``b`` sequences, ``g`` key heads of width ``k``, ``h`` = g r value heads of width
``v``; the r value heads of a group share queries and keys.  For each head, with a state S [k, v]
whose rows decay by G_t = diag(exp(g_t)):

    S_t = G_t S_{t-1} + k_t b_t (v_t - (G_t S_{t-1})^T k_t)^T          o_t = S_t^T q_t

Within a chunk of ``l`` tokens, with a the cumulative sum of g, A_ij = k_i . exp(a_i - a_j) k_j for
j < i, P_ij = q_i . exp(a_i - a_j) k_j for j <= i, and S the state before the chunk, the corrections
are C = T b (V - (exp(a) K) S), where T is the inverse of 1 + b A (the WY representation).  Then

    O = (exp(a) Q) S + P C          S' = exp(a_l) S + (exp(a_l - a) K)^T C

Backward needs no gradients of exponents one by one.  A decay multiplies each path from a key to a
later token: the gradient of a_i is that of the paths that end at token i minus that of those that
begin there.  Per channel these are q dq + k dk, where k reads a state, and k dk, where k writes
one.  Per head, their difference is o_i . do_i - v_i . dv_i.  The state after the chunk adds S' dS'.
Everything is computed in float32 at least.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

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

    q and k [s, b, g, k], v [s, b, h, v], beta >= 0 [s, b, h], g <= 0 [s, b, h], or [s, b, h, k]
    with as many key heads as value heads.  ``state`` [b, h, k, v]: state before the first token
    (default: zeros).  ``sequence`` [s]: index of each token's packed sequence; the first one starts
    from ``state``, the others from zeros.  ``chunk_size``: a power of 2.

    Returns o [s, b, h, v] in the dtype of v, and the state [b, h, k, v] after the last token.
    """
    wide = torch.promote_types(v.dtype, torch.float32)
    s, b, groups = k.shape[:3]
    length = min(chunk_size, 1 << (s - 1).bit_length())
    missing = -s % length
    rates = beta.unsqueeze(-1), g if g.dim() == v.dim() else g.unsqueeze(-1)

    def in_chunks(x: Tensor) -> Tensor:
        """[s, b, h, ..] -> [c, b g, r, l, ..]; padding has beta 0: no effect."""
        if missing:
            x = F.pad(x, (0, 0) * (x.dim() - 1) + (0, missing))
        x = x.to(wide).unflatten(2, (groups, -1)).unflatten(0, (-1, length))
        return x.movedim(1, 4).flatten(1, 2).contiguous()

    places = None
    if sequence is not None:
        places = torch.cat([sequence, sequence[-1:].expand(missing)]).view(-1, length)
    if state is None:
        state = v.new_zeros(b, v.shape[2], k.shape[3], v.shape[3], dtype=wide)
    o, last = _Rule.apply(
        *(in_chunks(x) for x in (q, k, v, *rates)), state.to(wide).flatten(0, 1), places
    )
    o = o.unflatten(1, (b, groups)).movedim(4, 1)  # [c, l, b, g, r, v]
    o = o.reshape(-1, *v.shape[1:]).to(v.dtype)
    return o[:s] if missing else o, last.unflatten(0, (b, -1))


class _Rule(Function[Pair]):
    """The rule over q, k [c, n, 1, l, k], v, o [c, n, r, l, v], g [c, n, r, l, k or 1] and beta.

    beta [c, n, r, l, 1]; ``state`` [n r, k, v]; ``places`` [c, l]: index of each token's sequence.
    Only states pass from chunk to chunk, in three matmuls for all heads at once.
    """

    @staticmethod
    def forward(
        ctx: Context[None],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        beta: Tensor,
        g: Tensor,
        state: Tensor,
        places: Tensor | None,
    ) -> Pair:
        decays = _Decays(g, places)
        pairs = decays.pairs(torch.stack([k, q]), k)
        seen = pairs[1].flatten(1, 2)
        Tb = _inverse(pairs[0].mul_(beta)).mul_(beta.mT).flatten(1, 2)
        reads, asks, writes = (
            (x * by).flatten(1, 2)
            for x, by in ((k, decays.start), (q, decays.start), (k, decays.left))
        )
        values = v.flatten(1, 2)
        states = values.new_empty(len(v) + 1, *state.shape)  # before each chunk, and the last one
        states[0] = state
        made = torch.empty_like(values)
        for i in range(len(v)):
            rest = torch.baddbmm(values[i], reads[i], states[i], alpha=-1)
            torch.bmm(Tb[i], rest, out=made[i])
            torch.mul(states[i], decays.keep[i], out=states[i + 1])
            states[i + 1].baddbmm_(writes[i].mT, made[i])
        o = torch.matmul(asks, states[:-1])
        o.flatten(0, 1).baddbmm_(seen.flatten(0, 1), made.flatten(0, 1))
        o = o.view(v.shape)
        saved = (q, k, v, beta, g, Tb, seen, states, made, o)
        ctx.save_for_backward(*saved, *(() if places is None else (places,)))
        return o, states[-1].clone()

    @staticmethod
    def backward(ctx: Context[None], *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, beta, g, Tb, seen, states, made, o, *places = ctx.saved_tensors
        do, d_last = grads
        d_out = do.contiguous().flatten(1, 2)
        decays = _Decays(g, *places) if places else _Decays(g, None)
        reads, asks, writes = (
            (x * by).flatten(1, 2)
            for x, by in ((k, decays.start), (q, decays.start), (k, decays.left))
        )
        d_states = torch.empty_like(states)
        d_states[-1] = d_last
        torch.matmul(asks.mT, d_out, out=d_states[:-1])
        d_made = seen.mT @ d_out
        d_rest = torch.empty_like(made)
        for i in reversed(range(len(v))):
            d_made[i].baddbmm_(writes[i], d_states[i + 1])
            torch.bmm(Tb[i].mT, d_made[i], out=d_rest[i])
            d_states[i].addcmul_(decays.keep[i], d_states[i + 1])
            d_states[i].baddbmm_(reads[i].mT, d_rest[i], alpha=-1)

        d_pairs = made.new_empty(2, *v.shape[:-1], v.shape[-2])
        torch.matmul(d_rest, made.mT, out=d_pairs[0].flatten(1, 2)).neg_()
        torch.matmul(d_out, made.mT, out=d_pairs[1].flatten(1, 2))
        d_rows, d_writes = decays.backward(d_pairs, torch.stack([k, q]), k)

        def from_heads(x: Tensor, by: Tensor) -> Tensor:
            """Return the gradient of a product of q or k with a decay, summed over r."""
            x = x.view(*v.shape[:-1], -1).mul_(by)
            return x if v.shape[2] == 1 else x.sum(2, keepdim=True)

        into = states[:-1].mT
        d_rows[0] -= from_heads(d_rest @ into, decays.start)
        d_rows[1] += from_heads(d_out @ into, decays.start)
        d_writes += from_heads(made @ d_states[1:].mT, decays.left)
        dv = d_rest.view(v.shape)
        of_last = (d_states[1:] * states[1:]).sum(-1).view(*v.shape[:3], -1)
        if decays.is_per_channel:
            da = (d_rows[0] - d_writes).mul_(k).addcmul_(q, d_rows[1])
            itself = d_pairs[1].diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
            d_rows[1].addcmul_(itself, k)
            d_writes.addcmul_(itself, q)
        else:
            da = (o * do).addcmul_(v, dv, value=-1).sum(-1, keepdim=True)
            of_last = of_last.sum(-1, keepdim=True)
        da[..., -1, :] += of_last
        dg = cumulative_sum(da.flip(-2), -2).flip(-2)
        # A rate of 0 is one that a sigmoid has rounded, whose gradient is 0 too.
        rate = beta.clamp_min(torch.finfo(beta.dtype).tiny)
        d_beta = (dv * made.view(v.shape)).sum(-1, keepdim=True).div_(rate).div_(rate)
        return d_rows[1], d_rows[0] + d_writes, dv, d_beta, dg, d_states[0], None


class _Decays:
    """Decays within a chunk, from its start, to its end and over it, for g [c, n, r, l, k or 1].

    They are 0 between tokens of different sequences.
    """

    def __init__(self, g: Tensor, places: Tensor | None) -> None:
        self.is_per_channel = g.shape[-1] > 1
        self.a = a = cumulative_sum(g, -2)
        to_end = a[..., -1:, :] - a
        self.apart = None  # [c, 1, 1, l, l]
        if places is not None:
            self.apart = (places[:, :, None] != places[:, None, :])[:, None, None]
            before = torch.cat([places[:1, 0], places[:-1, -1]])
            to_end = to_end.masked_fill(self.apart[..., -1, :, None], -math.inf)
            a = a.masked_fill((places != before[:, None])[:, None, None, :, None], -math.inf)
        if not self.is_per_channel:
            # What overflows is above the diagonal.
            self.within = (self.a - self.a.mT).exp_().tril_()  # [c, n, r, l, l]
            if self.apart is not None:
                self.within.masked_fill_(self.apart, 0)
        self.start = a.exp()
        self.left = to_end.exp()
        self.keep = self.start[..., -1, :].unsqueeze(-1).flatten(1, 2)  # [c, n r, k or 1, 1]

    def pairs(self, rows: Tensor, k: Tensor) -> Tensor:
        """Return rows_i . exp(a_i - a_j) k_j of a chunk's tokens, of j < i and of j <= i.

        ``rows`` [2, c, n, 1, l, k] has keys and queries: [2, c, n, r, l, l].
        """
        if not self.is_per_channel:
            pairs = (rows @ k.mT) * self.within
            pairs[0].tril_(-1)
            return pairs
        pairs = rows.new_zeros(*rows.shape[:-1], rows.shape[-2])
        pairs[1].diagonal(dim1=-2, dim2=-1).copy_((rows[1] * k).sum(-1))
        for size, upper, lower in self._levels():
            right = k.unflatten(-2, (-1, 2, size))[..., 0, :, :] * lower
            left = rows.unflatten(-2, (-1, 2, size))[..., 1, :, :] * upper
            _below(pairs, size).copy_(left @ right.mT)
        return pairs if self.apart is None else pairs.masked_fill_(self.apart, 0)

    def backward(self, grads: Tensor, rows: Tensor, k: Tensor) -> Pair:
        """Return the gradients of ``rows`` and of k from those of `pairs`, which may change.

        Per channel without those of each token with itself, which no decay multiplies.
        """
        if self.apart is not None:
            grads.masked_fill_(self.apart, 0)
        if not self.is_per_channel:
            grads = grads.mul_(self.within)
            grads[0].tril_(-1)
            grads = grads.sum(3, keepdim=True)
            return grads @ k, (grads.mT @ rows).sum(0)
        d_rows, d_k = torch.zeros_like(rows), torch.zeros_like(k)
        for size, upper, lower in self._levels():
            d_block = _below(grads, size)
            d_right, right = (x.unflatten(-2, (-1, 2, size))[..., 0, :, :] for x in (d_k, k))
            d_left, left = (x.unflatten(-2, (-1, 2, size))[..., 1, :, :] for x in (d_rows, rows))
            d_left += (d_block @ (right * lower)).mul_(upper)
            d_right += (d_block.mT @ (left * upper)).sum(0).mul_(lower)
        return d_rows, d_k

    def _levels(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield the factors of exp(a_i - a_j) for i in an upper and j in a lower half of a block.

        The last token of the lower half lies between i and j, so that neither factor overflows.
        Yields the size of halves 1, 2, 4, .. and two [c, n, 1, number of blocks, size, k].
        """
        size = 1
        while size < self.a.shape[-2]:
            earlier, later = self.a.unflatten(-2, (-1, 2, size)).unbind(-3)
            middle = earlier[..., -1:, :]
            yield size, (later - middle).exp_(), (middle - earlier).exp_()
            size *= 2


def _below(x: Tensor, size: int) -> Tensor:
    """View the lower left quarters of blocks of 2 ``size`` on the diagonal of x [.., l, l].

    Returns [.., number of blocks, size, size].
    """
    at = x.unflatten(-1, (-1, 2, size)).unflatten(-4, (-1, 2, size))
    quarters: Tensor = at[..., 1, :, :, 0, :].diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
    return quarters


def _inverse(lower: Tensor) -> Tensor:
    """Return the inverse of 1 + ``lower`` [.., l, l], strictly lower triangular; l a power of 2.

    Blocks of 1, 2, 4, ... rows are inverted in turn: [[A, 0], [C, B]] has the inverse
    [[A^-1, 0], [-B^-1 C A^-1, B^-1]].  torch's triangular solver takes matrix after matrix.
    """
    length = lower.shape[-1]
    blocks = lower.new_ones(*lower.shape[:-1], 1, 1)  # [.., number of blocks, rows, rows]
    while (rows := blocks.shape[-1]) < length:
        A, B = blocks[..., 0::2, :, :], blocks[..., 1::2, :, :]
        whole = lower.new_zeros(*A.shape[:-2], 2 * rows, 2 * rows)
        whole[..., :rows, :rows] = A
        whole[..., rows:, rows:] = B
        whole[..., rows:, :rows] = -(B @ _below(lower, rows) @ A)
        blocks = whole
    return blocks.squeeze(-3)
