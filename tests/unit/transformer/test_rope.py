"""Rotary positions: the closed form, its kernel, and the scalings of known model families."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megatron.core.fusions.rope import RotaryTable, apply_rotary
from megatron.core.transformer.rope import (
    RopeScaling,
    RotaryEmbedding,
    base_frequencies,
    llama3_frequencies,
)
from tests.support import kernel_references as references
from tests.support import tolerances


def rotate_by_hand(x: Tensor, width: int, interleaved: bool) -> Tensor:
    """Complex multiplication, pair by pair."""
    out = x.clone()
    for i in range(width // 2):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + width // 2)
        angle = torch.arange(x.shape[0]).double() * 10000 ** (-2 * i / width)
        turn = torch.polar(torch.ones_like(angle), angle)[:, None, None]
        pair = torch.complex(x[..., a], x[..., b]) * turn
        out[..., a], out[..., b] = pair.real, pair.imag
    return out


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("percent", [1.0, 0.5])
def test_each_pair_turns_by_position_times_frequency(interleaved: bool, percent: float) -> None:
    x = torch.randn(7, 2, 3, 8, dtype=torch.float64)
    rope = RotaryEmbedding(8, percent, interleaved)
    table = rope.table(7, 0, torch.float64)
    expected = rotate_by_hand(x, int(8 * percent), interleaved)
    torch.testing.assert_close(apply_rotary(x, table), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("width", [8, 6])
def test_the_kernel_has_the_values_and_gradients_of_the_reference(
    interleaved: bool, width: int
) -> None:
    angles = torch.randn(7, 1, 1, width // 2, dtype=torch.float64)
    table = RotaryTable(angles.cos(), angles.sin(), interleaved)
    wide = torch.randn(7, 2, 3, 16, dtype=torch.float64)
    results = []
    for function in (apply_rotary, references.apply_rotary):
        source = wide.clone().requires_grad_()
        out = function(source[..., 4:12], table)
        (out * torch.linspace(0, 1, out.numel()).view(out.shape)).sum().backward()
        results.append((out, source.grad))
    torch.testing.assert_close(results[0], results[1], **tolerances.of(torch.float64))


def test_tables_start_at_an_offset_and_are_kept() -> None:
    rope = RotaryEmbedding(8)
    whole, part = rope.table(9, 0, torch.float32), rope.table(4, 5, torch.float32)
    assert torch.equal(whole.cos[5:], part.cos)
    assert rope.table(4, 5, torch.float32) is part
    assert rope.table(4, 5, torch.bfloat16).cos.dtype == torch.bfloat16
    angles = rope(9)
    assert angles.shape == (9, 1, 1, 8)
    assert torch.equal(angles[:, 0, 0, :4].cos(), whole.cos[:, 0, 0])


def test_interpolation_divides_positions() -> None:
    stretched = RotaryEmbedding(8, seq_len_interpolation_factor=4).table(9, 0, torch.float32)
    plain = RotaryEmbedding(8).table(3, 0, torch.float32)
    assert torch.equal(stretched.cos[::4], plain.cos)


def test_windowed_layers_have_a_table_of_their_own_base_without_scaling() -> None:
    scaled = {"seq_len_interpolation_factor": 2.0, "rope_scaling": True}
    table = RotaryEmbedding(8, rotary_base=1e6, window_base=100.0, **scaled).table(
        6, 0, torch.float32
    )
    expected = RotaryEmbedding(8, rotary_base=100).table(6, 0, torch.float32)
    assert table.windowed is not None
    assert torch.equal(table.windowed.cos, expected.cos)
    assert torch.equal(table.windowed.sin, expected.sin)
    assert not torch.equal(table.cos, expected.cos)


def test_llama3_keeps_short_waves_and_divides_long_ones() -> None:
    base = base_frequencies(64, 10000)
    scaled = llama3_frequencies(base, RopeScaling(kind="llama3", factor=8))
    wave = 2 * math.pi / base
    assert torch.equal(scaled[wave < 2048], base[wave < 2048])
    assert torch.equal(scaled[wave > 8192], base[wave > 8192] / 8)
    between = (wave > 2048) & (wave < 8192)
    assert between.any()
    assert ((scaled < base) & (scaled > base / 8))[between].all()
    rope = RotaryEmbedding(64, rope_scaling=True)
    assert torch.equal(rope.frequencies(100), scaled)
