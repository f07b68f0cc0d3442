"""Statistics of layer inputs: the range that a static scale represents.

An observer has a histogram of magnitudes over the tokens of all ranks, between 0 and the largest
one, so that its result does not depend on the layout.

    max         the largest magnitude
    percentile  the magnitude that 99.99 % of the values do not exceed
    mse         the range with the smallest squared rounding error
    entropy     the range whose rounded histogram has the smallest divergence (KL) from the original
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from megatron.core.parallel.collectives import all_reduce_over
from megatron.core.quantization.formats import NumberFormat, codes_of, scale_of, values_of

ObserverKind = Literal["max", "percentile", "mse", "entropy"]
OBSERVERS: tuple[ObserverKind, ...] = ("max", "percentile", "mse", "entropy")
_BINS = 2048
_SHARE = 0.9999  # of `percentile`
_CANDIDATES = 64  # ranges that `mse` and `entropy` compare
_SMALLEST = 0.2  # of the largest magnitude, of these


class RangeObserver:
    """Magnitudes of the inputs of one layer: first the largest one, then a histogram."""

    def __init__(self, where: torch.device, kind: ObserverKind) -> None:
        self.kind = kind
        self.amax = torch.zeros((), device=where)
        self.histogram = torch.zeros(_BINS, dtype=torch.float64, device=where)
        self._counts = False  # the second pass

    def __call__(self, x: Tensor) -> None:
        """Add the values of ``x``."""
        magnitudes = x.detach().abs().float().flatten()
        if not magnitudes.numel():
            return
        if not self._counts:
            self.amax = torch.maximum(self.amax, magnitudes.amax())
            return
        place = (magnitudes * (_BINS / self.amax.clamp(min=1e-30))).long().clamp(max=_BINS - 1)
        self.histogram += torch.bincount(place, minlength=_BINS)

    def end_first_pass(self, *groups: ProcessGroup) -> None:
        """Agree on the largest magnitude; values are counted from here on.  Collective."""
        all_reduce_over(self.amax, *groups, op=ReduceOp.MAX)
        self._counts = True

    def range(self, to: NumberFormat, *groups: ProcessGroup) -> Tensor:
        """Return the magnitude [] that the format must represent.  Collective over ``groups``.

        The groups add up the histogram: a rank's values may count once in each of them.
        """
        if self.kind == "max" or to.has_two_levels:  # blocks have dynamic scales of their own
            return self.amax
        counts = all_reduce_over(self.histogram.clone(), *groups)
        share = (counts.cumsum(0) / counts.sum().clamp(min=1)).float()
        if self.kind == "percentile":
            bins = torch.searchsorted(share, torch.tensor(_SHARE, device=share.device)) + 1
            return self.amax * bins.clamp(max=_BINS) / _BINS
        loss = _squared_error if self.kind == "mse" else _divergence
        fractions = torch.linspace(_SMALLEST, 1, _CANDIDATES, device=counts.device)
        losses = torch.stack([loss(counts, fraction, to) for fraction in fractions])
        # The widest of equal ranges: a constant input has no error in any of them.
        best = _CANDIDATES - 1 - losses.flip(0).argmin()
        return self.amax * fractions[best]


def _rounded(fraction: Tensor, to: NumberFormat) -> tuple[Tensor, Tensor]:
    """Return the middles of the bins, as shares of amax, and their values in the format."""
    middles = (torch.arange(_BINS, device=fraction.device) + 0.5).view(1, -1) / _BINS
    whole = NumberFormat(to.kind, to.bits)
    scale = scale_of(fraction.view(1, 1), whole)
    values = values_of(codes_of(middles, scale, whole), scale, whole, dtype=torch.float32)
    return middles[0], values[0]


def _squared_error(counts: Tensor, fraction: Tensor, to: NumberFormat) -> Tensor:
    middles, values = _rounded(fraction, to)
    return (counts * (middles - values).square()).sum()


def _divergence(counts: Tensor, fraction: Tensor, to: NumberFormat) -> Tensor:
    """Return the divergence of the histogram from one that is even within each code."""
    _, values = _rounded(fraction, to)
    codes, code = values.unique(return_inverse=True)
    # Clamped values count in the last bin of the range, as in TensorRT's calibration.
    middles = torch.arange(_BINS, device=counts.device) / _BINS
    inside = middles < fraction
    p = counts * inside
    last = int(inside.sum()) - 1
    p[last] += counts[~inside].sum()
    kept = (counts * inside > 0).double()
    of_code = torch.zeros(len(codes), dtype=counts.dtype, device=counts.device)
    sums = of_code.index_add(0, code, counts * inside)
    bins = of_code.index_add(0, code, kept)
    q = (sums / bins.clamp(min=1))[code] * kept
    total = q.sum().clamp(min=1e-30)
    is_counted = (p > 0) & (q > 0)
    p = p / p.sum().clamp(min=1e-30)
    ratio = torch.where(is_counted, p / (q / total).clamp(min=1e-30), 1.0)
    missing = torch.where((p > 0) & (q == 0), p, 0.0).sum()  # clamped values without a bin
    return (p * ratio.log()).sum() + missing
