"""Sampling noise as a function of (seed, position, token id), equal in any batch and layout.

Gumbel-max sampling: argmax(logits + g) with g = -log(e), e ~ Exp(1) per token, is a sample of
softmax(logits).  Tokens form blocks of 64 consecutive ids.  The smallest of 64 exponential numbers
is Exp(64) and lies at a uniform place; the others exceed it by further Exp(1) numbers
(memorylessness).  So e of a token is computed from two hashes, of its block and of itself, and
the hash of a block alone bounds the noise of its tokens: `choose` reads few blocks.

Integer hashes give the same bits on every device; the logarithms may differ between devices in
the last bit.  Shapes: ``r`` rows, ``v`` token ids, ``n`` blocks.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

BLOCK = 64  # tokens
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_LARGEST_UNIFORM = 1 - 2.0**-24


def row_keys(seeds: list[int], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return two 32-bit keys [r, 2] for each row; ``positions`` are those of the new tokens.

    Any integer is a seed; its lowest 64 bits count.
    """
    key = _mix64(np.array([seed & 0xFFFFFFFFFFFFFFFF for seed in seeds], np.uint64) + _GOLDEN)
    key = _mix64(key + positions.astype(np.uint64) * _GOLDEN)
    halves = np.stack([key & np.uint64(0xFFFFFFFF), key >> np.uint64(32)], axis=-1)
    return halves.astype(np.uint32).view(np.int32).astype(np.int64)


def choose(logits: Tensor, keys: Tensor, first: int = 0) -> tuple[Tensor, Tensor]:
    """Return a token of softmax(``logits`` [r, v]) for each row, and its noisy logit.

    ``keys`` [r, 2]: of `row_keys`.  ``first``: id of the first column, a multiple of 64: of the
    shards of a vocabulary, the one with the largest noisy logit has the token.
    """
    noisy = logits + gumbel(keys, logits.size(1), first)
    token = noisy.argmax(-1)
    return token + first, noisy.gather(-1, token[:, None])[:, 0]


def gumbel(keys: Tensor, count: int, first: int = 0) -> Tensor:
    """Return Gumbel noise [r, count] of tokens ``first`` (a multiple of 64) and following."""
    assert first % BLOCK == 0, "a part of the vocabulary begins at a multiple of 64 tokens"
    end = -(-(first + count) // BLOCK)
    blocks = torch.arange(first // BLOCK, end, dtype=torch.int32, device=keys.device)
    return exponentials(keys, blocks[None]).flatten(1)[:, :count].log().neg()


def exponentials(keys: Tensor, blocks: Tensor) -> Tensor:
    """Return Exp(1) numbers [r, n, 64] of the tokens of ``blocks``: int32 [r, n] or [1, n]."""
    keys = keys.to(torch.int32)[..., None]
    least, place = _least(keys, blocks)
    lanes = torch.arange(BLOCK, dtype=torch.int32, device=keys.device)
    tokens = blocks[..., None] * BLOCK + lanes
    excess = _unit_exponential(_hash(tokens, keys[..., None]))
    excess.masked_fill_(lanes == place[..., None], 0)
    return excess.add_(least[..., None])


def uniform(hashed: Tensor) -> Tensor:
    """Return numbers in (0, 1) from the lower 31 bits of int32 hashes; dense near 0."""
    return ((hashed & 0x7FFFFFFF).float() + 0.5).mul_(2.0**-31).clamp_(max=_LARGEST_UNIFORM)


def _least(keys: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the smallest exponential number [r, n] of each block, and its place in the block."""
    hashed = _hash(~blocks, keys)  # ids of tokens are never negative
    return _unit_exponential(hashed).div_(BLOCK), _mix32(hashed ^ 0x5BD1E995) & (BLOCK - 1)


def _unit_exponential(hashed: Tensor) -> Tensor:
    return uniform(hashed).neg_().log1p_().neg_()


def _hash(ids: Tensor, keys: Tensor) -> Tensor:
    """Return 32 mixed bits; ``keys``: [r, 2, ...], its halves broadcast with int32 ``ids``."""
    return _mix32(_mix32(ids ^ keys[:, 0]).add_(keys[:, 1]))


def _mix32(x: Tensor) -> Tensor:
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
