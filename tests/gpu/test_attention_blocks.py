"""Each attention kernel of a ring: two blocks of keys, merged, against the formula in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron.core.transformer.attention_blocks import BlockCall, ScoreRule, block_kernel
from megatron.core.transformer.context_parallel import merge_attention
from tests.gpu.conftest import IS_INTERPRETED
from tests.support import tolerances

# float32 has no flash kernel on a GPU.
CASES = [
    ("flash", torch.bfloat16),
    ("fused", torch.bfloat16),
    ("plain", torch.bfloat16),
    ("plain", torch.float32),
]
_SCALE = 0.25
_ROWS = slice(8, 32)  # the queries of a block, out of longer rows


@pytest.fixture(autouse=True)
def kernels_used(kernels_used: set[str]) -> set[str]:
    """Count torch's kernels: no other is tested here."""
    kernels_used.add("torch")
    return kernels_used


@pytest.mark.parametrize(
    ("name", "dtype"),
    # Only a GPU has the others.
    [case for case in CASES if case[0] in ("flash", "plain") or not IS_INTERPRETED],
)
def test_blocks_of_a_ring_have_the_gradients_of_all_keys(
    name: str, dtype: torch.dtype, where: str
) -> None:
    check(name, dtype, where)


def check(name: str, dtype: torch.dtype, where: str) -> None:
    """Compare output and gradients of grouped queries, whose last block of keys is causal.

    As in a ring, all tensors are rows of longer ones, with tokens before heads in memory.
    """
    kernel = block_kernel(name)
    rule = ScoreRule(scale=_SCALE)
    generator = torch.Generator().manual_seed(0)
    shapes = ((40, 2, 4, 16), (48, 2, 2, 16), (48, 2, 2, 16), (40, 2, 4, 16))
    host = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    q, k, v, grad = (x.to(where).permute(1, 2, 0, 3) for x in host)
    out = torch.zeros(q.shape, device=where)
    lse = torch.full(q.shape[:-1], -torch.inf, device=where)
    blocks = ((slice(24), False), (slice(24, 48), True))
    calls = [
        BlockCall(
            q=q[:, :, _ROWS], k=k[:, :, keys], v=v[:, :, keys], rule=rule, is_causal=is_causal
        )
        for keys, is_causal in blocks
    ]
    for call in calls:
        part, part_lse, kept = kernel.forward(call)
        assert not kept or name != "plain"
        merge_attention(out[:, :, _ROWS], lse[:, :, _ROWS], part, part_lse)
    grads = [torch.zeros(x.shape, device=where) for x in (q, k, v)]
    half = out.to(dtype)
    for call, (keys, _) in zip(calls, blocks, strict=True):
        *_, kept = kernel.forward(call)
        given = grad[:, :, _ROWS], half[:, :, _ROWS], lse[:, :, _ROWS], kept
        found = kernel.backward(call, *given)
        for total, rows, part in zip(grads, (_ROWS, keys, keys), found, strict=True):
            total[:, :, rows] += part
    wanted = _formula(*(x.double().permute(1, 2, 0, 3) for x in host))
    for ours, exact in zip((out, *grads), wanted, strict=True):
        torch.testing.assert_close(ours.cpu().double(), exact, **tolerances.of(dtype))


def _formula(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
    """Return the output of the block's queries, 0 for others, and the gradients of q, k and v."""
    leaves = [x.requires_grad_() for x in (q, k, v)]
    keys, values = (x.repeat_interleave(2, 1) for x in leaves[1:])
    hidden = torch.ones(24, 48, dtype=torch.bool).triu(25)
    scores = (leaves[0][:, :, _ROWS] @ keys.mT * _SCALE).masked_fill(hidden, -torch.inf)
    out = torch.zeros_like(q)
    out[:, :, _ROWS] = scores.softmax(-1) @ values
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]
