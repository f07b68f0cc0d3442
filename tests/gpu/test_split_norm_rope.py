"""A packed projection is split, normalized per head and rotated as by separate operations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron.core.fusions.rope import RMSNorms, RotaryTable, split_and_rotate
from megatron.core.fusions.triton import rope
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.norms import Norm
from tests.gpu.test_kernels import DTYPES, compare
from tests.support import kernel_references as references
from tests.support import tolerances
from tests.support.one_process import one_process_groups, tiny_config

WIDTH = 24
EPS = 1e-5


def no_norm(x: Tensor) -> Tensor:
    """Fail: the kernel normalizes."""
    raise AssertionError("a norm apart from the kernel")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "groups", "per_group", "rotated"), [(5, 3, 2, 24), (5, 3, 2, 14), (1, 1, 5, 24)]
)
def test_splitting_normalizing_and_rotating_a_packed_projection(
    tokens: int,
    groups: int,
    per_group: int,
    rotated: int,
    dtype: torch.dtype,
    where: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rope, "_PROGRAMS", 3)  # several tokens for each
    angles = torch.randn(tokens, 2, 1, rotated // 2, device=where)
    table = RotaryTable(angles.cos(), angles.sin())

    def ours(packed: Tensor, query_weight: Tensor, key_weight: Tensor) -> Tensor:
        rms = RMSNorms(query_weight, key_weight, EPS)
        parts = split_and_rotate(packed, WIDTH, table, (no_norm, no_norm), rms, fused=True)
        return torch.cat([p.transpose(0, 2) for p in parts])

    def reference(packed: Tensor, query_weight: Tensor, key_weight: Tensor) -> Tensor:
        query, key, value = packed.split([per_group * WIDTH, WIDTH, WIDTH], -1)
        query = query.reshape(tokens, 2, -1, WIDTH)
        turned = [
            references.apply_rotary(
                x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight, table
            )
            for x, weight in ((query, query_weight), (key, key_weight))
        ]
        return torch.cat([p.transpose(0, 2) for p in (*turned, value)])

    shape = tokens, 2, groups, (per_group + 2) * WIDTH
    weights = (torch.rand(2, WIDTH) + 0.5).to(where, dtype)
    compare(ours, reference, torch.randn(shape).to(where, dtype), *weights)


def test_attention_with_norms_of_queries_and_keys_takes_the_kernel(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(
        qk_layernorm=True,
        normalization="RMSNorm",
        num_query_groups=2,
        layernorm_zero_centered_gamma=True,
        apply_rope_fusion=True,
    )
    slots = SelfAttentionSubmodules(
        ColumnParallelLinear, DotProductAttention, RowParallelLinear, Norm, Norm
    )
    layer = SelfAttention(config, slots, 1, pg_collection=one_process_groups()).to(where)
    for param in layer.parameters():
        torch.nn.init.normal_(param, std=0.2)
    angles = torch.randn(5, 1, 1, 4, device=where)
    table = RotaryTable(angles.cos(), angles.sin())
    x = torch.randn(5, 2, 32, device=where)

    def gradients() -> list[Tensor]:
        parts = layer.queries_keys_values(x, table)
        loss = sum((part.square() * part.sin()).sum() for part in parts)
        assert isinstance(loss, Tensor)
        return [*parts, *torch.autograd.grad(loss, norms)]

    norms = [layer.q_layernorm.weight, layer.k_layernorm.weight]
    calls: list[int] = []
    run = rope.split
    monkeypatch.setattr(rope, "split", lambda *args: calls.append(1) or run(*args))
    fused = gradients()
    assert calls
    monkeypatch.setattr(SelfAttention, "_rms_norms", lambda self: None)
    for ours, apart in zip(fused, gradients(), strict=True):
        torch.testing.assert_close(ours, apart, **tolerances.GRADIENT)
    assert len(calls) == 1
