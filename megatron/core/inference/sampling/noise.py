"""Sampling noise as a function of (seed, position, token id), equal in any batch and layout.

Gumbel-max sampling: argmax(logits + g) with g = -log(e), e ~ Exp(1) per token, is a sample of
softmax(logits).  Tokens form blocks of 32 consecutive ids.  The smallest of 32 exponential numbers
is Exp(32) and lies at a uniform place; the others exceed it by further Exp(1) numbers
(memorylessness).  So e of a token is computed from two hashes, of its block and of itself, and
the hash of a block alone bounds the noise of its tokens: `choose` needs the noise of few blocks.

Integer hashes give the same bits on every device; the logarithms may differ between devices in
the last bit.  Shapes: ``r`` rows, ``v`` token ids, ``n`` blocks, ``m`` of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron.core.device import launches_kernels
from megatron.core.inference.sampling.blocks import BLOCK, Blocks
from megatron.core.inference.sampling.filters import Scale

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST_BLOCKS = 32  # of a row: their best token rules out nearly all others
_ROUNDING = 1e-4  # larger than that of a noisy logit near the largest


def row_keys(seeds: list[int], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return two 32-bit keys [r, 2] for each row; ``positions`` are those of the new tokens.

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
    """Return what `_Search.best_of` returns of all blocks, from those that can have the token.

    The host waits for the number of these blocks, which is free on a CPU.
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
    """Return the finaliser of SplitMix64 (Steele, Lea and Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
