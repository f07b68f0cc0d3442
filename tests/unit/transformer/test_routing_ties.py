"""Which visits an expert keeps when their weights are as good as equal."""

from __future__ import annotations

import torch

from megatron.core.transformer.moe.routing import fits


def test_weights_that_only_rounding_tells_apart_are_kept_by_position():
    """Equal tokens, such as padding: two layouts must not drop different ones of them."""
    equal = torch.full((6, 1), 0.3, dtype=torch.float64)
    noise = torch.tensor([[1.0], [-2.0], [3.0], [-1.0], [2.0], [0.0]]) * 1e-8
    for visits in (equal, equal + noise, equal - noise):
        assert fits(visits, 2, "probs").flatten().tolist() == [True, True] + [False] * 4
    clear = equal.clone()
    clear[4] += 1e-3
    assert fits(clear, 2, "probs").flatten().tolist() == [True, False, False, False, True, False]
