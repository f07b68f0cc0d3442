"""Positions of the rows of each slot that are not the places in the request: M-RoPE, LongRoPE."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron.core.inference.paged_engine.prompt_images import PromptImage
from megatron.core.inference.paged_engine.step_plan import Admission, Integers
from megatron.core.models.vision.qwen2_vl import MERGE


class SlotPositions:
    """What determines the rotation of the rows of ``num_slots`` slots.

    ``start_lengths`` [slots]: tokens of the request when it started (LongRoPE).  ``has_grid``:
    rows have a time, a height and a width (M-RoPE).  The three are equal for text; text after an
    image begins at the image's first position plus the larger of its height and width.
    """

    def __init__(self, num_slots: int, *, has_grid: bool = False) -> None:
        self.has_grid = has_grid
        self.start_lengths: Integers = np.zeros(num_slots, dtype=np.int64)
        self._grids: dict[int, Integers] = {}  # by slot: [3, rows up to the end of the last image]
        self._ends: Integers = np.zeros(num_slots, dtype=np.int64)  # these rows
        self._offsets: Integers = np.zeros(num_slots, dtype=np.int64)  # of the rows after them

    def admit(self, admission: Admission, images: Sequence[PromptImage]) -> None:
        """Note the request that takes a slot, and its images; forget the one before."""
        slot = admission.slot
        self.start_lengths[slot] = admission.start_length
        if not self.has_grid:
            return
        self._grids.pop(slot, None)
        self._ends[slot] = self._offsets[slot] = 0
        if images:
            grid, following = grid_of_prompt(images, admission.image_starts)
            self._grids[slot] = grid
            self._ends[slot] = grid.shape[1]
            self._offsets[slot] = following - grid.shape[1]

    def grid(self, positions: Integers, slots: Integers) -> Integers:
        """Return time, height and width [3, N] of the rows at ``positions`` of ``slots`` [N]."""
        out = np.tile(positions + self._offsets[slots], (3, 1))
        is_before = positions < self._ends[slots]
        for slot in np.unique(slots[is_before]).tolist():
            mine = is_before & (slots == slot)
            out[:, mine] = self._grids[slot][:, positions[mine]]
        return out


def grid_of_prompt(images: Sequence[PromptImage], starts: Sequence[int]) -> tuple[Integers, int]:
    """Return time, height and width [3, n] of the rows up to the last image, and the next position.

    ``starts``: the first row of each image.
    """
    parts: list[Integers] = []
    row = 0
    following = 0
    for image, start in zip(images, starts, strict=True):
        text = following + np.arange(start - row)
        parts.append(np.tile(text, (3, 1)))
        following += start - row
        height, width = (patches // MERGE for patches in image.size[1:])
        frame, within = np.divmod(np.arange(image.num_rows), height * width)
        parts.append(following + np.stack([frame, *np.divmod(within, width)]))
        following += max(height, width)
        row = start + image.num_rows
    return np.concatenate(parts, axis=1), following
