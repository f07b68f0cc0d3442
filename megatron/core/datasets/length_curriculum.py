"""Begin pretraining with short contexts that grow (--length-curriculum).

Samples keep their tokens and their shape.  Attention and positions begin anew after each context of
L tokens, as they do after a document, so that each step trains as many tokens at any L.  L depends
on the number of the sample only: a resumed run, and any layout, reads the same.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron.core.datasets.gpt_dataset import get_ltor_masks_and_position_ids
from megatron.core.datasets.megatron_dataset import Sample
from megatron.core.packed_seq_params import PackedBounds


class LengthCurriculum(torch.utils.data.Dataset[Sample]):
    """Samples of ``data`` whose contexts grow from ``start`` to all tokens [s].

    They grow linearly over the first ``num_samples`` samples.  The end-of-document token ``eod``
    ends a context too.  ``as_bounds``: attention_mask is a PackedBounds, else bool [1, s, s].
    """

    def __init__(
        self, data: Any, start: int, num_samples: int, *, eod: int, as_bounds: bool
    ) -> None:
        self._data = data
        self._start = start
        self._num_samples = num_samples
        self._eod = eod
        self._as_bounds = as_bounds

    def __len__(self) -> int:
        return len(self._data)

    def context_length(self, idx: int, sequence_length: int) -> int:
        """Return the most tokens that a token of sample ``idx`` attends to."""
        grown = (sequence_length - self._start) * idx // self._num_samples
        return min(sequence_length, self._start + grown)

    def __getitem__(self, idx: int | None) -> Sample:
        sample: Sample = self._data[idx]
        tokens = sample["tokens"]
        sequence_length = len(tokens)
        length = self.context_length(idx or 0, sequence_length)
        if idx is None or length == sequence_length:
            return sample
        is_end = (torch.arange(1, sequence_length + 1) % length == 0) | (tokens == self._eod)
        mask, _, position_ids = get_ltor_masks_and_position_ids(
            is_end.long(), 1, True, True, False, create_attention_mask=not self._as_bounds
        )
        bounds = PackedBounds.of_documents(is_end) if self._as_bounds else mask
        return {**sample, "position_ids": position_ids, "attention_mask": bounds}
