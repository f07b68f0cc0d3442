"""Noise of sampling: its distribution, and that only seed, position and token id decide it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron.core.inference.paged_engine.choice import (
    Blocks,
    Scale,
    choose,
    exponentials,
    row_keys,
)


def keys(seeds: list[int], positions: list[int]) -> Tensor:
    return torch.from_numpy(row_keys(seeds, np.array(positions))).int()


def sampled(logits: Tensor, rows: Tensor) -> Tensor:
    zeros = torch.zeros(len(logits))
    unscaled = Scale(zeros, zeros + 1, zeros - torch.inf)
    return choose(Blocks.of(logits), unscaled, rows)


def noise_of(rows: Tensor, first_block: int, end_block: int) -> Tensor:
    """Return the Gumbel noise of all tokens of some blocks."""
    blocks = torch.arange(first_block, end_block, dtype=torch.int32)[None]
    return exponentials(rows, blocks).flatten(1).log().neg()


def chi_square(values: Tensor, buckets: int = 1000) -> float:
    """Return (statistic - mean) / deviation of numbers that should be uniform in (0, 1)."""
    seen = torch.bincount((values.flatten().double() * buckets).long(), minlength=buckets)
    expected = values.numel() / buckets
    statistic = ((seen - expected) ** 2 / expected).sum().item()
    return (statistic - (buckets - 1)) / math.sqrt(2 * (buckets - 1))


@pytest.mark.parametrize("along", ["tokens", "seeds", "positions"])
def test_noise_is_uniform_and_neighbours_are_independent(along: str) -> None:
    row = {
        "tokens": keys([5], [9]),
        "seeds": keys(list(range(4096)), [3] * 4096),
        "positions": keys([1] * 4096, list(range(4096))),
    }[along]
    blocks = torch.arange(4096 if along == "tokens" else 1, dtype=torch.int32)[None]
    values = exponentials(row, blocks).neg().exp()  # uniform in (0, 1)
    assert abs(chi_square(values)) < 4.5
    if along == "tokens":
        a = values.flatten()[:-1]
        b = values.flatten()[1:]
    else:
        a = values[:-1].flatten()
        b = values[1:].flatten()
    correlation = torch.corrcoef(torch.stack([a, b]))[0, 1].item()
    assert abs(correlation) * math.sqrt(len(a)) < 4.5
    pair = (a * 32).floor() / 32 + b / 32  # uniform if a and b are independent
    assert abs(chi_square(pair, 1024)) < 4.5


def test_hashes_do_not_change() -> None:
    rows = row_keys([0, 1, 2**64 - 1], np.array([0, 7, 2**40]))
    assert rows.tolist() == [
        [-12790593, 1210155558],
        [438411019, -1605172716],
        [1024219659, -1179233709],
    ]
    tokens = sampled(torch.zeros(3, 50304), torch.from_numpy(rows))
    assert tokens.tolist() == [11968, 22372, 35962]


def test_noise_of_a_token_depends_on_seed_position_and_token_only() -> None:
    rows = keys([3, 4, 3, 2**64 + 3], [10, 10, 11, 10])
    noise = noise_of(rows, 0, 20)
    assert torch.equal(noise[0], noise[3])  # seeds count modulo 2**64
    assert not (noise[0] == noise[1]).any()
    assert not (noise[0] == noise[2]).any()
    assert torch.equal(noise_of(rows[1:2], 4, 9), noise[1:2, 128:288])


@pytest.mark.parametrize("deviation", [0.0, 1.0, 5.0, 30.0])
def test_few_blocks_have_the_same_largest_noisy_logit_as_the_vocabulary(deviation: float) -> None:
    logits = torch.randn(500, 1003, generator=torch.Generator().manual_seed(1)) * deviation
    rows = keys(list(range(500)), [5] * 500)
    noisy = logits + noise_of(rows, 0, 32)[:, :1003]
    assert torch.equal(sampled(logits, rows), noisy.argmax(-1))


def test_tokens_are_chosen_with_their_probabilities() -> None:
    number = 100_000
    logits = torch.randn(300, generator=torch.Generator().manual_seed(2)) * 2
    rows = keys(list(range(number)), [0] * number)
    seen = torch.zeros(300)
    for part in rows.split(10_000):
        seen += torch.bincount(sampled(logits.expand(len(part), -1), part), minlength=300)
    expected = torch.softmax(logits, -1) * number
    often = expected >= 5
    statistic = ((seen - expected) ** 2 / expected)[often].sum().item()
    free = int(often.sum()) - 1
    assert abs(statistic - free) < 4.5 * math.sqrt(2 * free)


def test_likely_tokens_in_many_blocks_are_all_searched() -> None:
    """With one likely token in a block, the bounds of the blocks decide little."""
    logits = torch.full((300, 200 * 32), -30.0)
    logits[:, 7::32] = 0
    rows = keys(list(range(300)), [5] * 300)
    noisy = logits + noise_of(rows, 0, 200)
    assert torch.equal(sampled(logits, rows), noisy.argmax(-1))
