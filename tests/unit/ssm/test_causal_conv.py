"""The convolution of a Mamba layer against torch's, float64."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.ssm.recurrent_mixer import causal_conv
from tests.support import tolerances

_CLOSE = tolerances.of(torch.float64)


def _given() -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    shapes = (9, 2, 3), (3, 1, 4), (3,), (3, 2, 3)
    return [torch.randn(s, generator=draw, dtype=torch.float64).requires_grad_() for s in shapes]


def test_it_is_a_convolution_that_sees_what_came_before() -> None:
    x, weight, bias, before = _given()
    y, after = causal_conv(x, weight, bias, before=before)
    rows = torch.cat([before, x]).permute(1, 2, 0)
    expected = F.silu(F.conv1d(rows, weight, bias, groups=3)).permute(2, 0, 1)
    torch.testing.assert_close(y, expected, **_CLOSE)
    assert torch.equal(after, x[-3:])
    weights = torch.linspace(0.5, 1.5, y.numel(), dtype=torch.float64).view(y.shape)
    found, wanted = (
        torch.autograd.grad((out * weights).sum(), (x, weight, bias, before))
        for out in (y, expected)
    )
    torch.testing.assert_close(found, wanted, **_CLOSE)


def test_packed_sequences_are_convolved_one_by_one() -> None:
    x, weight, bias, _ = _given()
    lengths = [4, 1, 4]
    sequence = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    packed = causal_conv(x, weight, bias, sequence=sequence)[0]
    alone = torch.cat([causal_conv(part, weight, bias)[0] for part in x.split(lengths)])
    torch.testing.assert_close(packed, alone, **_CLOSE)
    found, wanted = (
        torch.autograd.grad(out.square().sum(), (x, weight, bias)) for out in (packed, alone)
    )
    torch.testing.assert_close(found, wanted, **_CLOSE)
