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
    keys, first_block = keys.to(torch.int32), first // BLOCK
    if launches_kernels(keys.device):
        every = torch.arange(logits.maxima.size(1), device=keys.device).expand_as(logits.maxima)
        best, place = _noisy(logits, scale, keys, every, first_block)
    else:
        best, place = _choose_of_few(logits, scale, keys, first_block)
    block = best.argmax(-1, keepdim=True)
    token = block * BLOCK + place.gather(-1, block)
    return token[:, 0] + first, best.gather(-1, block)[:, 0]


def _choose_of_few(
    logits: Blocks, scale: Scale, keys: Tensor, first_block: int
) -> tuple[Tensor, Tensor]:
    """Return what `_noisy` returns of all blocks, -inf where a block cannot have the maximum.

    The host waits for the number of other blocks, about 32 in a row, which is free on a CPU.
    """
    numbers = torch.arange(logits.maxima.size(1), dtype=torch.int32)[None] + first_block
    bound = scale(logits.maxima) - _least(numbers, keys[..., None])[0].log_()
    likely = bound.topk(min(_FIRST_BLOCKS, bound.size(1))).indices
    reached = _noisy(logits, scale, keys, likely, first_block)[0].amax(-1, keepdim=True)
    rows, blocks = (bound >= reached - _ROUNDING).nonzero(as_tuple=True)
    part = logits.take(rows), scale.take(rows), keys[rows]
    of_blocks, places = _noisy(*part, blocks[:, None], first_block)
    best = torch.full_like(bound, float("-inf"))
    best[rows, blocks] = of_blocks[:, 0]
    place = torch.zeros_like(bound, dtype=torch.int64)
    place[rows, blocks] = places[:, 0]
    return best, place


def _noisy(
    logits: Blocks, scale: Scale, keys: Tensor, blocks: Tensor, first_block: int
) -> tuple[Tensor, Tensor]:
    """Return the largest noisy logit of each of ``blocks`` [r, m], and its place in the block."""
    numbers = (blocks + first_block).to(torch.int32)
    noisy = scale(logits.values(blocks)).sub_(exponentials(keys, numbers).log_())
    place = noisy.argmax(-1)
    return noisy.gather(-1, place[..., None])[..., 0], place


def exponentials(keys: Tensor, blocks: Tensor) -> Tensor:
    """Return Exp(1) numbers [r, m, 32] of the tokens of ``blocks`` [r, m]; all integers int32."""
    least, place = _least(blocks, keys[..., None])
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
