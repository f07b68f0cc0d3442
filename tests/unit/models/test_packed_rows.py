"""GPT on packed conversations: each is computed as if it were alone in its row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.packed_seq_params import PackedBounds, PackedSeqParams
from tests.support import tolerances
from tests.unit.models.test_gpt_model import LENGTH, VOCABULARY, build, tokens

LENGTHS = (5, 3, 4)


def packed(*lengths: int) -> PackedSeqParams:
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    return PackedSeqParams.of_bounds(PackedBounds(ends, max(lengths)))


def losses(model: Any, ids: Tensor, *lengths: int) -> Tensor:
    positions = torch.cat([torch.arange(n) for n in lengths]).unsqueeze(0)
    labels = (ids + 1) % VOCABULARY
    found: Tensor = model(ids, positions, None, labels=labels, packed_seq_params=packed(*lengths))
    return found


@pytest.mark.feature("Fine-tuning: editing one packed conversation leaves its neighbours bitwise")
@pytest.mark.parametrize("position", ["rope", "learned_absolute", "alibi"])
def test_editing_one_conversation_leaves_the_losses_of_the_others_bitwise(position: str) -> None:
    model = build(position)
    ids = tokens(batch=1)[0]
    before = losses(model, ids, *LENGTHS)
    edited = ids.clone()
    edited[0, 5:8] = (edited[0, 5:8] + 1) % VOCABULARY
    after = losses(model, edited, *LENGTHS)
    assert torch.equal(after[0, :5], before[0, :5])
    assert torch.equal(after[0, 8:], before[0, 8:])
    assert not torch.equal(after[0, 5:8], before[0, 5:8])


@pytest.mark.parametrize(
    "layer",
    [
        {},
        {"window_size": (2, 0)},
        {"softmax_type": "learnable"},
        {"num_moe_experts": 4, "moe_router_topk": 2},
        {
            "longrope_short_factor": (1.0, 1.5, 2.0, 2.5),
            "longrope_long_factor": (3.0,) * 4,
            "longrope_original_max_position_embeddings": 4,
        },
    ],
)
def test_a_packed_conversation_has_the_losses_of_one_alone(layer: dict[str, Any]) -> None:
    model = build("rope", **layer)
    ids = tokens(batch=1)[0]
    together = losses(model, ids, *LENGTHS)
    start = 0
    for length in LENGTHS:
        alone = losses(model, ids[:, start : start + length], length)
        torch.testing.assert_close(
            together[:, start : start + length], alone, **tolerances.of(torch.float32)
        )
        start += length
    assert start == LENGTH


def test_the_longest_sequence_of_a_micro_batch_needs_no_read_of_the_device() -> None:
    """A kernel starts as many thread blocks per sequence as the longest one needs, not the row."""
    bounds = PackedBounds(torch.tensor([0, 3, 9, 16], dtype=torch.int32, device="meta"), 7)
    assert PackedSeqParams.of_bounds(bounds).longest(num_tokens=16) == 7


def test_tokens_after_the_last_sequence_count_as_one_more() -> None:
    ends = torch.tensor([0, 3, 5], dtype=torch.int32)
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, max_seqlen_q=3)
    assert packed.longest(num_tokens=16) == 16  # unknown yet
    assert packed.lengths == (3, 2)
    assert packed.longest(num_tokens=16) == 11
