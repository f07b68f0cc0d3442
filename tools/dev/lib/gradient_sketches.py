"""Describe the first gradients of a training run by few numbers, and compare two runs by them.

A run that saves after its first step leaves the first moments of Adam: the gradients times
1 - beta1, complete whatever the layout of the run.  The sketch of a tensor is its norm and its sums
under random signs.  For two tensors, the mean square of the differences of these sums estimates
the square of the norm of their difference.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.reader import CheckpointReader

SIGNS = 8  # sums of a sketch: the estimate has the true size within a factor of 2
_FIRST_MOMENT = "optimizer.state.exp_avg."
# Tensors with less than this share of the norm of all tensors are compared with that: some
# gradients are sums of roundings alone, such as those of the biases of keys.
_SMALLEST_SHARE = 1e-2

Sketches = dict[str, list[float]]  # name of a parameter: norm, then sums


def sketches_of(checkpoint: Path) -> Sketches:
    """Return the sketches of the first moments in a checkpoint folder of the default format.

    Raises CheckpointError if the folder is damaged or holds no first moments.
    """
    with CheckpointReader(checkpoint) as reader:
        names = sorted(key for key in reader.tensors if key.startswith(_FIRST_MOMENT))
        return {name.removeprefix(_FIRST_MOMENT): sketch(name, reader.read(name)) for name in names}


def sketch(name: str, values: Tensor) -> list[float]:
    """Return the norm of a tensor and its sums under the random signs of ``name``."""
    flat = values.double().flatten()
    # An integer hash of the place: no generator, whose numbers may be others in another release.
    place = torch.arange(len(flat)) + (zlib.crc32(name.encode()) << 24)
    mixed = place * 0x9E3779B97F4A7C1
    mixed = (mixed ^ (mixed >> 29)) * 0x3F58476D1CE4E5B9
    mixed ^= mixed >> 32
    sums = [(flat * (1 - 2 * (mixed >> bit & 1))).sum() for bit in range(SIGNS)]
    return [float(f"{number:.6g}") for number in (float(flat.norm()), *map(float, sums))]


def gaps(
    found: Mapping[str, Sequence[float]], wanted: Mapping[str, Sequence[float]]
) -> dict[str, float]:
    """Return the estimated relative difference of each parameter; NaN if one side lacks it."""
    total = math.hypot(*(norm for norm, *_ in wanted.values()))
    result = dict.fromkeys(sorted({*found, *wanted}), math.nan)
    for name in found.keys() & wanted.keys():
        norm, *sums = found[name]
        wanted_norm, *wanted_sums = wanted[name]
        squares = [(a - b) ** 2 for a, b in zip(sums, wanted_sums, strict=True)]
        apart = max(math.sqrt(sum(squares) / SIGNS), abs(norm - wanted_norm))
        result[name] = apart / max(wanted_norm, _SMALLEST_SHARE * total)
    return result
