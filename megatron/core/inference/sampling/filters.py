"""Top-k, top-p and min-p as a least logit of each row: tokens below it are not sampled.

Tokens of equal logits are kept together, so that the set of tokens does not depend on the order
of a sort.  Shapes: ``r`` rows, ``v`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron.core.device import launches_kernels
from megatron.core.device.determinism import cumulative_sum
from megatron.core.inference.sampling.blocks import Blocks

_ROWS_IN_CACHE = 2  # of a vocabulary, that a CPU sorts and sums together


@dataclass(frozen=True)
class Filters:
    """Parameters of r rows, on the host."""

    temperature: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int64]  # v: no limit
    top_p: npt.NDArray[np.float32]  # 1: no limit
    min_p: npt.NDArray[np.float32]  # 0: no limit


@dataclass(frozen=True)
class Scale:
    """How logits [r, ...] become those of the sampled distribution: all tensors are [r].

    The largest becomes 0, so that a small temperature cannot overflow to infinity.
    """

    highest: Tensor
    temperature: Tensor
    least: Tensor | None = None  # smaller logits become -inf

    def __call__(self, logits: Tensor) -> Tensor:
        shape = (-1,) + (1,) * (logits.dim() - 1)
        scaled = (logits - self.highest.view(shape)).div_(self.temperature.view(shape))
        if self.least is None:
            return scaled
        return scaled.masked_fill_(logits < self.least.view(shape), float("-inf"))

    def take(self, index: Tensor) -> Scale:
        """Return the rows of ``index``."""
        least = None if self.least is None else self.least[index]
        return Scale(self.highest[index], self.temperature[index], least)


def scale_of(logits: Blocks, filters: Filters, upload: Callable[[npt.ArrayLike], Tensor]) -> Scale:
    """Return temperature and least logit of each row, where the filters of ``filters`` give one.

    Rows are searched together by what they need: their largest k logits, or all in order.
    """
    scale = Scale(logits.maxima.amax(-1), upload(filters.temperature))
    is_limited = filters.top_k < logits.logits.size(1)
    least = None
    if is_limited.any() or (filters.top_p < 1).any():
        least = torch.full_like(scale.highest, float("-inf"))
        ordered = np.flatnonzero(~is_limited & (filters.top_p < 1))
        size = max(len(ordered), 1) if launches_kernels(least.device) else _ROWS_IN_CACHE
        parts = [ordered[i : i + size] for i in range(0, len(ordered), size)]
        for index in (np.flatnonzero(is_limited), *parts):
            if len(index):
                at = upload(index)
                top_k = upload(filters.top_k[index])
                top_p = upload(filters.top_p[index])
                best = logits.take(at).largest(int(filters.top_k[index].max()))
                place = top_k - 1
                if (filters.top_p[index] < 1).any():
                    place = _last_of_top_p(scale.take(at)(best), place, top_p)
                least.index_copy_(0, at, best.gather(-1, place[:, None])[:, 0])
    if (filters.min_p > 0).any():
        of_min_p = scale.highest + scale.temperature * upload(filters.min_p).log()
        least = of_min_p if least is None else torch.maximum(least, of_min_p)
    return Scale(scale.highest, scale.temperature, least)


def _last_of_top_p(best: Tensor, last: Tensor, top_p: Tensor) -> Tensor:
    """Return how many tokens follow the first in the smallest set with probability ``top_p``.

    ``best`` [r, k]: scaled logits in descending order, overwritten; those after ``last`` [r] do
    not count.
    Nucleus sampling, Holtzman et al. 2020.
    """
    sums = cumulative_sum(best.exp_(), -1, dtype=torch.float64, in_fixed_order=True)
    enough = sums.gather(-1, last[:, None]) * top_p[:, None]
    return torch.where(top_p < 1, torch.searchsorted(sums, enough)[:, 0].clamp(max=last), last)
