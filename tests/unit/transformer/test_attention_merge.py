"""The merge of two attention results is the attention over both blocks of keys."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megatron.core.transformer.context_parallel import merge_attention
from tests.support import tolerances


def attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    scores = q @ k.mT
    lse = scores.logsumexp(-1)
    return (scores - lse.unsqueeze(-1)).exp() @ v, lse


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [8, 40, 192])
def test_two_blocks_of_keys_give_the_attention_over_both(width: int, dtype: torch.dtype) -> None:
    b, n, q, k = 2, 3, 37, 11
    query = torch.randn(b, n, q, width, dtype=torch.float64) / 4
    key, value = torch.randn(2, b, n, 2 * k, width, dtype=torch.float64).unbind()
    parts = [attention(query, key[..., i, :], value[..., i, :]) for i in (slice(k), slice(k, None))]
    expected, expected_lse = attention(query, key, value)
    # As in a ring: tokens before heads in memory, and a block of a longer row of queries.
    out = torch.zeros(q + 5, b, n, width).permute(1, 2, 0, 3)[:, :, 3:-2]
    lse = torch.full((b, n, q + 5), -math.inf)[..., 3:-2]
    for part, part_lse in parts:
        part = part.transpose(1, 2).contiguous().to(dtype).transpose(1, 2)
        merge_attention(out, lse, part, part_lse.float())
    limits = tolerances.of(dtype)
    torch.testing.assert_close(out, expected.float(), **limits)
    torch.testing.assert_close(lse, expected_lse.float(), **tolerances.of(torch.float32))


def test_blocks_without_keys_change_nothing() -> None:
    shape = (1, 2, 5, 16)
    nothing = torch.full(shape[:-1], -math.inf)
    out, lse = torch.zeros(shape), nothing.clone()
    merge_attention(out, lse, torch.zeros_like(out), nothing)
    assert not out.any()
    assert torch.equal(lse, nothing)
    part, part_lse = torch.randn(shape), torch.randn(shape[:-1])
    merge_attention(out, lse, part, part_lse)
    merge_attention(out, lse, torch.zeros_like(out), nothing)
    torch.testing.assert_close(out, part, **tolerances.of(torch.float32))
    torch.testing.assert_close(lse, part_lse, **tolerances.of(torch.float32))
