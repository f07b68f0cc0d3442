"""Attention to packed sequences on a CPU."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.transformer.dot_product_attention import DotProductAttention
from tests.support.one_process import tiny_config
from tests.unit.transformer.test_attention_core import inputs, packed


def test_packed_sequences_on_a_cpu_are_computed_one_by_one() -> None:
    core = DotProductAttention(tiny_config(), layer_number=1)
    q, k, v = inputs()
    calls = []

    def sdpa(query: Tensor, *args: Any, **named: Any) -> Tensor:
        calls.append((query.shape[2], named["attn_mask"]))
        return F.scaled_dot_product_attention(query, *args, **named)

    core.sdpa = sdpa  # type: ignore[method-assign]
    out = core(q, k, v, packed_seq_params=packed(3, 2, 4))  # and a token after the last
    assert calls == [(3, None), (2, None), (4, None), (1, None)]
    changed = q.detach().clone()
    changed[3:5] += 1
    again = core(changed, k, v, packed_seq_params=packed(3, 2, 4))
    assert torch.equal(again[:3], out[:3])
    assert torch.equal(again[5:], out[5:])
    assert not torch.equal(again[3:5], out[3:5])
