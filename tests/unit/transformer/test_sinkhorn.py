"""The even assignment: what it is, and how long it takes."""

from __future__ import annotations

from itertools import count
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron.core.transformer.moe.routing import sinkhorn


def few_looks() -> Any:
    """Fails where the host asks the device for a result more than 10 times."""
    looks = count(1)

    def look(x: Tensor) -> bool:
        assert next(looks) <= 10, "it does not end"
        return x.item() != 0

    return mock.patch.object(Tensor, "__bool__", look)


def logits(preference: float, dtype: torch.dtype) -> Tensor:
    """Of tokens that all prefer some experts so strongly."""
    torch.manual_seed(0)
    return torch.randn(1024, 64, dtype=dtype) + preference * torch.randn(64, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("preference", [0.0, 2.0, 3.0, 10.0])
def test_every_expert_gets_as_much_however_strongly_some_are_preferred(
    preference: float, dtype: torch.dtype
) -> None:
    given = logits(preference, dtype)
    with few_looks():
        even = sinkhorn(given)
    torch.testing.assert_close(even.sum(0), torch.full_like(even[0], 1 / 64), rtol=1e-4, atol=0)
    torch.testing.assert_close(
        even.sum(1), torch.full_like(even[:, 0], 1 / 1024), rtol=1e-3, atol=0
    )


@pytest.mark.parametrize("preference", [0.0, 3.0])
def test_only_rows_and_columns_are_scaled(preference: float) -> None:
    given = logits(preference, torch.float64)
    scales = sinkhorn(given).log() - given
    mixed = scales - scales[:1] - scales[:, :1] + scales[0, 0]
    torch.testing.assert_close(mixed, torch.zeros_like(mixed))


def test_logits_beyond_the_range_of_exp_stay_finite() -> None:
    given = torch.zeros(8, 4)
    given[:, 0], given[:, 1] = 200.0, -200.0
    with few_looks():
        assert sinkhorn(given).isfinite().all()
