"""Contexts that grow with the number of the sample."""

from __future__ import annotations

import torch

from megatron.core.datasets.gpt_dataset import LengthCurriculum, get_ltor_masks_and_position_ids
from megatron.core.packed_seq_params import PackedBounds

EOD = 9
TOKENS = torch.tensor([1, 2, EOD, 4, 5, 6, 7, 8])
SAMPLE = {"tokens": TOKENS, "labels": TOKENS, "position_ids": torch.arange(8)}


def curriculum(*, as_bounds: bool) -> LengthCurriculum:
    return LengthCurriculum([SAMPLE] * 20, 2, 12, eod=EOD, as_bounds=as_bounds)


def test_contexts_grow_linearly_to_the_complete_sample() -> None:
    data = curriculum(as_bounds=False)
    lengths = [data.context_length(i, 8) for i in range(20)]
    assert lengths == [2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7, *[8] * 8]
    assert data[12] is SAMPLE


def test_a_context_ends_as_a_document_does() -> None:
    row = curriculum(as_bounds=False)[4]
    ended = TOKENS.clone()
    ended[3] = ended[7] = EOD
    mask, _, positions = get_ltor_masks_and_position_ids(ended, EOD, True, True, False)
    assert torch.equal(row["attention_mask"], mask)
    assert torch.equal(row["position_ids"], positions)
    assert row["position_ids"].tolist() == [0, 1, 2, 0, 0, 1, 2, 3]
    assert row["tokens"] is TOKENS
    bounds = curriculum(as_bounds=True)[4]["attention_mask"]
    assert isinstance(bounds, PackedBounds)
    assert bounds.cumulative.tolist() == [0, 3, 4, 8]
