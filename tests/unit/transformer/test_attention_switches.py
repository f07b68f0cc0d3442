"""The choice of torch's attention kernels and their switches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.core.transformer import dot_product_attention
from megatron.core.transformer.attention_backends import PLAIN, AttentionRequest, only_kernels
from megatron.core.transformer.dot_product_attention import DotProductAttention
from tests.support.one_process import tiny_config


def test_torch_may_use_the_chosen_kernels_only_until_a_call_ends() -> None:
    cuda = torch.backends.cuda

    def enabled() -> tuple[bool, ...]:
        return (
            cuda.flash_sdp_enabled(),
            cuda.cudnn_sdp_enabled(),
            cuda.mem_efficient_sdp_enabled(),
            cuda.math_sdp_enabled(),
        )

    before = enabled()
    with only_kernels(("flash", "efficient")):
        assert enabled() == (True, False, True, False)
        with only_kernels(("fused",)):
            assert enabled() == (False, True, False, False)
        assert enabled() == (True, False, True, False)
    with pytest.raises(ValueError, match="kernel"), only_kernels(("fused",)):
        raise ValueError("a kernel refuses")
    assert enabled() == before


@pytest.mark.parametrize("is_special", [False, True])
def test_a_call_passes_the_fields_of_its_request_in_their_order(
    is_special: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[Any, ...]] = []

    def choose_for(*properties: Any) -> tuple[str, ...]:
        given.append(properties)
        return (PLAIN,)

    monkeypatch.setattr(dot_product_attention, "choose_for", choose_for)
    wanted = {
        "has_mask": is_special,
        "has_bias": is_special,
        "has_dropout": is_special,
        "has_softcap": is_special,
        "causal_tokens": 0 if is_special else 5,
    }
    softcap = 3.0 if is_special else None
    config = tiny_config(attention_dropout=is_special * 0.5, attn_logit_softcapping=softcap)
    core = DotProductAttention(config, layer_number=1)
    query = torch.zeros(5, 1, 4, 8)
    extra: dict[str, Any] = {}
    if is_special:
        extra = {
            "attention_mask": torch.zeros(1, 1, 5, 5, dtype=torch.bool),
            "attention_bias": torch.zeros(1, 4, 5, 5),
        }
    core(query, query, query, **extra)
    ((backend, *properties),) = given
    assert backend is config.attention_backend
    fields = AttentionRequest.__dataclass_fields__
    request = AttentionRequest(**dict(zip(fields, properties, strict=True)))
    assert request == AttentionRequest(dtype=torch.float32, head_dim=8, **wanted)
    assert properties[5:12] == [
        *(False, wanted["has_bias"], wanted["has_dropout"], wanted["has_softcap"]),
        *(wanted["causal_tokens"], False, False),
    ]
