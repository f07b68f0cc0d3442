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
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron.core.device import launches_kernels
from megatron.core.device.determinism import cumulative_sum
from megatron.core.inference.sampling_params import SamplingParams

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


_ROWS_IN_CACHE = 2  # of a vocabulary, that a CPU sorts and sums together


@dataclass(frozen=True)
class Filters:
    """Parameters of r rows, on the host."""

    temperature: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int64]  # v: no limit
    top_p: npt.NDArray[np.float32]  # 1: no limit
    min_p: npt.NDArray[np.float32]  # 0: no limit


@dataclass(frozen=True)
class Scale:
    """Scale and shift logits [r, ...] to the sampled distribution: all tensors are [r].

    The largest becomes 0, so that a small temperature cannot overflow to infinity.
    """

    highest: Tensor
    temperature: Tensor
    least: Tensor | None = None  # smaller logits become -inf

    def __call__(self, logits: Tensor) -> Tensor:
        shape = (-1,) + (1,) * (logits.dim() - 1)
        scaled = (logits - self.highest.view(shape)).div_(self.temperature.view(shape))
        if self.least is None:
            return scaled
        return scaled.masked_fill_(logits < self.least.view(shape), float("-inf"))

    def take(self, index: Tensor) -> Scale:
        """Return the rows of ``index``."""
        least = None if self.least is None else self.least[index]
        return Scale(self.highest[index], self.temperature[index], least)


def scale_of(logits: Blocks, filters: Filters, upload: Callable[[npt.ArrayLike], Tensor]) -> Scale:
    """Return temperature and least logit of each row, where the filters of ``filters`` give one.

    Rows with a top-k are searched together for their largest logits; the others are sorted.
    """
    scale = Scale(logits.maxima.amax(-1), upload(filters.temperature))
    is_limited = filters.top_k < logits.logits.size(1)
    least = None
    if is_limited.any() or (filters.top_p < 1).any():
        least = torch.full_like(scale.highest, float("-inf"))
        ordered = np.flatnonzero(~is_limited & (filters.top_p < 1))
        size = max(len(ordered), 1) if launches_kernels(least.device) else _ROWS_IN_CACHE
        parts = [ordered[i : i + size] for i in range(0, len(ordered), size)]
        for index in (np.flatnonzero(is_limited), *parts):
            if len(index):
                at = upload(index)
                top_k = upload(filters.top_k[index])
                top_p = upload(filters.top_p[index])
                best = logits.take(at).largest(int(filters.top_k[index].max()))
                place = top_k - 1
                if (filters.top_p[index] < 1).any():
                    place = _last_of_top_p(scale.take(at)(best), place, top_p)
                least.index_copy_(0, at, best.gather(-1, place[:, None])[:, 0])
    if (filters.min_p > 0).any():
        of_min_p = scale.highest + scale.temperature * upload(filters.min_p).log()
        least = of_min_p if least is None else torch.maximum(least, of_min_p)
    return Scale(scale.highest, scale.temperature, least)


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


def choose(logits: Blocks, scale: Scale, keys: Tensor, first: int = 0) -> tuple[Tensor, Tensor]:
    """Return a token of softmax(scale(``logits``)) for each row, and its noisy logit.

    ``keys`` [r, 2]: of `row_keys`.  ``first``: id of the first column, a multiple of 32: of the
    shards of a vocabulary, the one with the largest noisy logit has the token.
    """
    assert first % BLOCK == 0, "a part of the vocabulary begins at a multiple of 32 tokens"
    keys = keys.to(torch.int32)
    count = logits.maxima.size(1)
    numbers = torch.arange(count, dtype=torch.int32, device=keys.device)[None] + first // BLOCK
    least, place = _least(numbers, keys[..., None])
    search = _Search(logits, scale, keys, numbers.expand_as(least), least, place)
    if launches_kernels(keys.device) or count <= _FIRST_BLOCKS:
        score, token = search.best_of(torch.arange(count, device=keys.device).expand_as(least))
    else:
        score, token = _best_of_few(search)
    return token + first, score


def exponentials(keys: Tensor, blocks: Tensor) -> Tensor:
    """Return Exp(1) numbers [r, m, 32] of the tokens of ``blocks`` [r, m]; all integers int32."""
    return _in_blocks(keys, blocks, *_least(blocks, keys[..., None]))


@dataclass(frozen=True)
class _Search:
    """Rows in which a token is searched; of all blocks: number, least exponential, its place."""

    logits: Blocks
    scale: Scale
    keys: Tensor
    numbers: Tensor
    least: Tensor
    place: Tensor

    def take(self, rows: Tensor) -> _Search:
        """Return the search of ``rows``."""
        of_blocks = (t[rows] for t in (self.numbers, self.least, self.place))
        return _Search(self.logits.take(rows), self.scale.take(rows), self.keys[rows], *of_blocks)

    def best_of(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Return the largest noisy logit of ``blocks`` [r, m], in ascending order; its column."""
        of_blocks = (t.gather(1, blocks) for t in (self.numbers, self.least, self.place))
        noise = _in_blocks(self.keys, *of_blocks).log_()
        noisy = self.scale(self.logits.values(blocks)).sub_(noise).flatten(1)
        at = noisy.argmax(-1, keepdim=True)
        token = blocks.gather(1, at // BLOCK) * BLOCK + at % BLOCK
        return noisy.gather(1, at)[:, 0], token[:, 0]


def _best_of_few(search: _Search) -> tuple[Tensor, Tensor]:
    """Return the result of `_Search.best_of` for all blocks, from a search of few blocks.

    Blocks whose bound is below the best noisy logit of the first ones are skipped.  The host waits
    for the number of the others, which costs nothing on a CPU.
    """
    bound = search.scale(search.logits.maxima).sub_(search.least.log())
    likely = bound.topk(_FIRST_BLOCKS + 1)
    score, token = search.best_of(likely.indices[:, :-1].sort().values)
    unsure = (likely.values[:, -1] >= score - _ROUNDING).nonzero()[:, 0]
    if len(unsure):
        bound = bound[unsure]
        reached = score[unsure, None] - _ROUNDING
        count = int((bound >= reached).sum(-1).max())
        blocks = bound.topk(count).indices.sort().values
        score[unsure], token[unsure] = search.take(unsure).best_of(blocks)
    return score, token


def _in_blocks(keys: Tensor, blocks: Tensor, least: Tensor, place: Tensor) -> Tensor:
    """Return the numbers of `exponentials` of blocks whose least number and its place are known."""
    lanes = torch.arange(BLOCK, dtype=torch.int32, device=keys.device)
    tokens = blocks[..., None] * BLOCK + lanes
    excess = _unit_exponential(_hash(tokens, keys[..., None, None]))
    excess.masked_fill_(lanes == place[..., None], 0)
    return excess.add_(least[..., None])


def _least(blocks: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return the smallest exponential number [r, m] of each block, and its place in the block."""
    hashed = _hash(~blocks, keys)  # ids of tokens are never negative; the lowest bits are spare
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
    return x ^ (x >> np.uint64(31))


def sample_tokens(logits: Tensor, params: SamplingParams) -> Tensor:
    """Return one token [b] for each row of ``logits`` [b, v] under ``params``.

    Noise comes from torch's generator, or from ``params.seed``.  Penalties do not apply.
    """
    if params.is_greedy:
        return logits.argmax(-1)
    count, vocab_size = logits.shape
    blocks = Blocks.of(logits.float())
    full = np.ones(count, np.float32)
    wanted = Filters(
        full * np.float32(params.temperature),
        np.full(count, min(params.top_k or vocab_size, vocab_size), np.int64),
        full * np.float32(params.top_p or 1.0),
        full * np.float32(params.min_p),
    )

    def upload(values: object) -> Tensor:
        return torch.as_tensor(values, device=logits.device)

    seed = int(torch.randint(2**62, ())) if params.seed is None else params.seed
    keys = row_keys([seed] * count, np.arange(count))
    scale = scale_of(blocks, wanted, upload)
    return choose(blocks, scale, upload(keys))[0]
