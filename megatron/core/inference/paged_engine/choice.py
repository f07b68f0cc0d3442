"""Choose one token of each row of logits: filters, then noise.

Top-k, top-p and min-p are a least logit of each row (`Scale`): tokens below it are not sampled.
Tokens of equal logits are kept together, so that the set of tokens does not depend on the order of
a sort.

Gumbel-max sampling: argmax(logits + g) with g = -log(e), e ~ Exp(1) per token, is a sample of
softmax(logits).  The noise is a function of (seed, position, token id), equal in any batch and
layout.  Tokens form blocks of 32 consecutive ids.  The smallest of 32 exponential numbers is
Exp(32) and lies at a uniform place; the others exceed it by further Exp(1) numbers
(memorylessness).  So e of a token is computed from two hashes, of its block and of itself, and the
hash of a block alone bounds the noise of its tokens: `choose` needs the noise of few blocks.
Integer hashes give the same bits on every device; the logarithms may differ between devices in
the last bit.

Shapes: ``r`` rows, ``v`` columns or token ids, ``n`` blocks, ``m`` of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron.core.device import launches_kernels
from megatron.core.device.determinism import cumulative_sum

BLOCK = 32


@dataclass(frozen=True)
class Blocks:
    """Rows ``rows`` [r] of ``logits`` [.., v], fp32, with ``maxima`` [r, n] of their blocks."""

    logits: Tensor
    rows: Tensor
    maxima: Tensor

    @staticmethod
    def of(logits: Tensor) -> Blocks:
        """Return all rows of ``logits``."""
        whole = logits.size(1) // BLOCK * BLOCK
        maxima = logits[:, :whole].unflatten(1, (-1, BLOCK)).amax(-1)
        if whole < logits.size(1):
            maxima = torch.cat([maxima, logits[:, whole:].amax(-1, keepdim=True)], dim=1)
        return Blocks(logits, torch.arange(len(logits), device=logits.device), maxima)

    def take(self, index: Tensor) -> Blocks:
        """Return the rows of ``index``; does not copy logits."""
        return Blocks(self.logits, self.rows[index], self.maxima.index_select(0, index))

    def tokens(self, blocks: Tensor) -> Tensor:
        """Return the columns [r, m, 32] of ``blocks`` [r, m]; in the last block up to v or more."""
        return blocks[..., None] * BLOCK + torch.arange(BLOCK, device=blocks.device)

    def values(self, blocks: Tensor) -> Tensor:
        """Return the logits [r, m, 32] of ``blocks`` [r, m]; -inf beyond the last column."""
        size = self.logits.size(1)
        tokens = self.tokens(blocks)
        values = self.logits[self.rows[:, None, None], tokens.clamp(max=size - 1)]
        return values.masked_fill_(tokens >= size, float("-inf")) if size % BLOCK else values

    def argmax(self) -> Tensor:
        """Return the column [r] of the largest logit: NaN if there is one, the first of equals."""
        block = self.maxima.argmax(-1, keepdim=True)
        return block[:, 0] * BLOCK + self.values(block)[:, 0].argmax(-1)

    def largest(self, count: int) -> Tensor:
        """Return the ``count`` largest logits [r, count] in descending order."""
        if count < self.maxima.size(1) // 2:
            candidates = self.values(self.maxima.topk(count).indices).flatten(1)
            return candidates.topk(count).values
        logits = self.logits.index_select(0, self.rows)
        if launches_kernels(logits.device):
            return logits.topk(count).values
        # numpy sorts values without their places, with vector instructions: 30 times as fast
        return torch.from_numpy(np.sort(logits.numpy())).flip(-1)[:, :count]

    def likeliest(self, count: int) -> Tensor:
        """Return the columns [r, count] of the ``count`` largest logits, best first.

        Of equal logits the first columns come first, for any ``count``.
        """
        blocks = _first_of_largest(self.maxima, min(count, self.maxima.size(1))).sort().values
        candidates = self.values(blocks).flatten(1)
        found = self.tokens(blocks).flatten(1).gather(-1, _first_of_largest(candidates, count))
        return found.clamp(max=self.logits.size(1) - 1)  # where NaN is smaller than -inf


def _first_of_largest(values: Tensor, count: int) -> Tensor:
    """Return the columns of the ``count`` largest values, best and, of equals, first columns first.

    The keys of the search hold the value's bits, in an order in which they compare as integers,
    above the inverted column.
    """
    bits = (values + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    keys = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64) << 32
    keys += torch.arange(values.size(1) - 1, -1, -1, device=values.device)
    return values.size(1) - 1 - (keys.topk(count, dim=-1).values & 0xFFFFFFFF)


class Scale(NamedTuple):
    """Scale and shift logits [r, ...] to the sampled distribution: all tensors are [r].

    The largest becomes 0, so that a small temperature cannot overflow to infinity.  Logits below
    ``least`` become -inf.
    """

    highest: Tensor
    temperature: Tensor
    least: Tensor

    def __call__(self, logits: Tensor) -> Tensor:
        shape = (-1,) + (1,) * (logits.dim() - 1)
        scaled = (logits - self.highest.view(shape)).div_(self.temperature.view(shape))
        return scaled.masked_fill_(logits < self.least.view(shape), float("-inf"))

    def take(self, index: Tensor) -> Scale:
        """Return the rows of ``index``."""
        return Scale(*(values[index] for values in self))


_ROWS_IN_CACHE = 2  # of a vocabulary, that a CPU sorts and sums together


def scale_of(
    logits: Blocks,
    temperature: npt.NDArray[np.float32],
    top_k: npt.NDArray[np.int64],
    top_p: npt.NDArray[np.float32],
    min_p: npt.NDArray[np.float32],
    upload: Callable[[npt.ArrayLike], Tensor],
) -> Scale:
    """Return temperature and least logit of each row, from parameters [r] on the host.

    A ``top_k`` of v, a ``top_p`` of 1 and a ``min_p`` of 0 are no limits.  Rows with a top-k are
    searched together for their largest logits; the others are sorted.
    """
    highest = logits.maxima.amax(-1)
    scale = Scale(highest, upload(temperature), torch.full_like(highest, float("-inf")))
    is_limited = top_k < logits.logits.size(1)
    ordered = np.flatnonzero(~is_limited & (top_p < 1))
    size = max(len(ordered), 1) if launches_kernels(highest.device) else _ROWS_IN_CACHE
    parts = [ordered[i : i + size] for i in range(0, len(ordered), size)]
    for index in (np.flatnonzero(is_limited), *parts):
        if not len(index):
            continue
        at = upload(index)
        best = logits.take(at).largest(int(top_k[index].max()))
        place = upload(top_k[index] - 1)
        if (top_p[index] < 1).any():
            scaled = (best - highest[at, None]).div_(scale.temperature[at, None])
            place = _last_of_top_p(scaled, place, upload(top_p[index]))
        scale.least.index_copy_(0, at, best.gather(-1, place[:, None])[:, 0])
    if (min_p > 0).any():
        of_min_p = highest + scale.temperature * upload(min_p).log()
        torch.maximum(scale.least, of_min_p, out=scale.least)
    return scale


def _last_of_top_p(best: Tensor, last: Tensor, top_p: Tensor) -> Tensor:
    """Return how many tokens follow the first in the smallest set with probability ``top_p``.

    ``best`` [r, k]: scaled logits in descending order, overwritten; those after ``last`` [r] do
    not count.
    Nucleus sampling, Holtzman et al. 2020.
    """
    sums = cumulative_sum(best.exp_(), -1, dtype=torch.float64, in_fixed_order=True)
    enough = sums.gather(-1, last[:, None]) * top_p[:, None]
    return torch.where(top_p < 1, torch.searchsorted(sums, enough)[:, 0].clamp(max=last), last)


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST_BLOCKS = 32  # of a row: their best token rules out nearly all others
_ROUNDING = 1e-4  # more than the rounding error of a noisy logit near the largest


def row_keys(seeds: list[int], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return two 32-bit keys [r, 2] for each row; ``positions``: of the new tokens.

    Any integer is a seed; its lowest 64 bits count.
    """
    key = _mix64(np.array([seed & 0xFFFFFFFFFFFFFFFF for seed in seeds], np.uint64) + _GOLDEN)
    key = _mix64(key + positions.astype(np.uint64) * _GOLDEN)
    halves = np.stack([key & np.uint64(0xFFFFFFFF), key >> np.uint64(32)], axis=-1)
    return halves.astype(np.uint32).view(np.int32).astype(np.int64)


def choose(logits: Blocks, scale: Scale, keys: Tensor) -> Tensor:
    """Return a token of softmax(scale(``logits``)) for each row; ``keys`` [r, 2]: of `row_keys`.

    On a CPU, blocks whose bound is below the best noisy logit of the first ones are skipped: there
    it costs nothing that the host waits for the number of the others.
    """
    keys = keys.to(torch.int32)
    count = logits.maxima.size(1)
    blocks = torch.arange(count, device=keys.device).expand_as(logits.maxima)
    if launches_kernels(keys.device) or count <= _FIRST_BLOCKS:
        return _best_of(logits, scale, keys, blocks)[1]
    bound = scale(logits.maxima).sub_(_least(blocks, keys)[0].log())
    likely = bound.topk(_FIRST_BLOCKS + 1)
    score, token = _best_of(logits, scale, keys, likely.indices[:, :-1].sort().values)
    unsure = (likely.values[:, -1] >= score - _ROUNDING).nonzero()[:, 0]
    if len(unsure):
        bound = bound[unsure]
        reached = score[unsure, None] - _ROUNDING
        most = int((bound >= reached).sum(-1).max())
        rest = logits.take(unsure), scale.take(unsure), keys[unsure]
        token[unsure] = _best_of(*rest, bound.topk(most).indices.sort().values)[1]
    return token


def _best_of(logits: Blocks, scale: Scale, keys: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest noisy logit of ``blocks`` [r, m], in ascending order; its column."""
    noise = exponentials(keys, blocks).log_()
    noisy = scale(logits.values(blocks)).sub_(noise).flatten(1)
    at = noisy.argmax(-1, keepdim=True)
    token = blocks.gather(1, at // BLOCK) * BLOCK + at % BLOCK
    return noisy.gather(1, at)[:, 0], token[:, 0]


def exponentials(keys: Tensor, blocks: Tensor) -> Tensor:
    """Return Exp(1) numbers [r, m, 32] of the tokens of ``blocks`` [r, m]; ``keys`` are int32."""
    least, place = _least(blocks, keys)
    lanes = torch.arange(BLOCK, dtype=torch.int32, device=keys.device)
    tokens = blocks.to(torch.int32)[..., None] * BLOCK + lanes
    excess = _unit_exponential(_hash(tokens, keys[..., None, None]))
    excess.masked_fill_(lanes == place[..., None], 0)
    return excess.add_(least[..., None])


def _least(blocks: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return the smallest exponential number [r, m] of each block, and its place in the block."""
    # Ids of tokens are never negative; the lowest bits are spare.
    hashed = _hash(~blocks.to(torch.int32), keys[..., None])
    return _unit_exponential(hashed).div_(BLOCK), hashed & (BLOCK - 1)


def _unit_exponential(hashed: Tensor) -> Tensor:
    """Return Exp(1) numbers from the lower 31 bits of int32 hashes; their precision is relative."""
    minus_uniform = ((hashed & 0x7FFFFFFF).float() + 0.5).mul_(-(2.0**-31))
    return minus_uniform.clamp_(min=2.0**-24 - 1).log1p_().neg_()


def _hash(ids: Tensor, keys: Tensor) -> Tensor:
    """Return 32 mixed bits; ``keys``: [r, 2, ...], its halves broadcast with int32 ``ids``."""
    if launches_kernels(ids.device):
        return _mix32(_mix32(ids ^ keys[:, 0]) + keys[:, 1])
    plain, halves = ids.numpy(), keys.numpy()  # a third of the time of torch's small operations
    return torch.from_numpy(_mix32(_mix32(plain ^ halves[:, 0]) + halves[:, 1]))


_Ints = TypeVar("_Ints", Tensor, npt.NDArray[np.int32])


def _mix32(x: _Ints) -> _Ints:
    """Overwrite int32 ``x`` by a bijective mix: C. Wellons' lowbias32 of hash-prospector."""
    x ^= (x >> 16) & 0xFFFF
    x *= 0x7FEB352D
    x ^= (x >> 15) & 0x1FFFF
    x *= 0x846CA68B - (1 << 32)
    x ^= (x >> 16) & 0xFFFF
    return x


def _mix64(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return the finalizer of SplitMix64 (Steele, Lea and Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: npt.NDArray[np.uint64] = x ^ (x >> np.uint64(31))
    return mixed
