"""Rules that change logits before a token is chosen: penalties and allowed tokens.

Shapes: ``s`` rows, ``v`` vocabulary.  Logits are fp32 and are changed in place.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron.core.inference.paged_engine.step_plan import Admission, Integers


class SlotRows:
    """Rows on the device for those slots that need one; their number and width grow by doubling."""

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.data = torch.zeros(0, width, dtype=dtype, device=device)
        self._row: dict[int, int] = {}
        self._free: list[int] = []

    def put(self, slot: int, values: npt.NDArray[Any]) -> None:
        """Give ``slot`` a row that begins with ``values``; the rest is 0."""
        self.free(slot)
        self.widen(len(values))
        if not self._free:
            size = len(self.data)
            self.data = torch.cat([self.data, self.data.new_zeros(max(size, 1), self.data.size(1))])
            self._free = list(range(len(self.data) - 1, size - 1, -1))
        row = self._row[slot] = self._free.pop()
        self.data[row] = 0
        found = torch.from_numpy(values)
        self.data[row, : len(values)] = found.to(self.data, non_blocking=True)

    def widen(self, width: int) -> None:
        """Give all rows at least ``width`` columns."""
        missing = width - self.data.size(1)
        if missing > 0:
            more = max(missing, self.data.size(1))
            self.data = torch.cat([self.data, self.data.new_zeros(len(self.data), more)], dim=1)

    def free(self, slot: int) -> None:
        """Free the row of ``slot``, if it has one."""
        row = self._row.pop(slot, None)
        if row is not None:
            self._free.append(row)

    def rows(self, slots: Iterable[int]) -> Tensor:
        """Return the rows of ``slots`` in `data` [s], on the host."""
        return torch.tensor([self._row[slot] for slot in slots], dtype=torch.int64)


class Penalties:
    """Repetition, presence and frequency penalties of the slots that have them.

    Repetition (Keskar et al. 2019) divides positive logits, and multiplies others, of tokens that
    the prompt or the generated text has; presence and frequency are subtracted, for generated
    tokens only.  Only the logits of a text's tokens are read and written, so that the cost grows
    with the text and not with the vocabulary.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._counts = SlotRows(vocab_size, torch.int32, device)  # how often it was generated
        self._in_prompt = SlotRows(vocab_size, torch.bool, device)
        self._texts = SlotRows(0, torch.int64, device)

    def admit(self, admission: Admission) -> None:
        """Take the text of a request that has penalties."""
        text = np.array(admission.history, dtype=np.int64)
        prompt, output = np.split(text, [admission.num_prompt])
        slot = admission.slot
        size = self._vocab_size
        self._counts.put(slot, np.bincount(output, minlength=size))
        self._in_prompt.put(slot, np.bincount(prompt, minlength=size) > 0)
        self._texts.put(slot, text)

    def free(self, slot: int) -> None:
        """Forget the text of ``slot``, if it has one."""
        for rows in (self._counts, self._in_prompt, self._texts):
            rows.free(slot)

    def apply(self, logits: Tensor, at: Tensor, slots: Integers, values: Tensor, size: int) -> None:
        """Change the rows ``at`` [s] of ``logits``, of ``slots``.

        ``values`` [s, 3]: repetition, presence and frequency.  ``size``: of the longest text.
        """
        where = self._of(slots, at)
        tokens = self._texts.data[where, :size]  # behind the end of a text: 0, seen or not
        repetition, presence, frequency = values.split(1, dim=-1)
        counts = self._counts.data[where[:, None], tokens]
        is_generated = counts > 0
        is_seen = is_generated | self._in_prompt.data[where[:, None], tokens]
        found = logits[at[:, None], tokens]
        repeated = torch.where(found > 0, found / repetition, found * repetition)
        lowered = torch.where(is_seen, repeated, found)
        lowered -= is_generated * presence + counts * frequency
        logits[at[:, None], tokens] = lowered  # a token that occurs twice gets one value twice

    def record(self, slots: Integers, positions: Integers, tokens: Tensor) -> None:
        """Add ``tokens`` [s], chosen for ``positions`` of texts; negative ones are not counted."""
        where = self._of(slots, tokens)
        self._texts.widen(int(positions.max()) + 1)
        at = torch.from_numpy(positions).to(tokens.device, non_blocking=True)
        valid = tokens.clamp(min=0)
        self._texts.data[where, at] = valid
        counts = self._counts.data
        counts.index_put_((where, valid), (tokens >= 0).to(counts.dtype), accumulate=True)

    def _of(self, slots: Integers, like: Tensor) -> Tensor:
        # The three kinds of rows are taken and freed together, so their numbers are equal.
        return self._counts.rows(slots.tolist()).to(like.device, non_blocking=True)


def keep_allowed(logits: Tensor, words: Tensor) -> None:
    """Set the logits of tokens to -inf whose bit is 0: bit t % 32 of ``words`` [s, w][t // 32].

    Tokens beyond the words are not allowed.
    """
    every = torch.arange(8, dtype=torch.uint8, device=words.device)
    in_bytes = words.to(torch.int32).view(torch.uint8)[..., None]  # lowest byte first
    allowed = (in_bytes.bitwise_right_shift(every) & 1).flatten(1).bool()[:, : logits.size(1)]
    logits[:, : allowed.size(1)].masked_fill_(~allowed, float("-inf"))
    logits[:, allowed.size(1) :] = float("-inf")
