"""Describe the first gradients of a training run by few numbers, and compare two runs by them.

A run that saves after its first step leaves the first moments of Adam: the gradients times
1 - beta1, complete whatever the layout of the run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from megatron.core.dist_checkpointing.reader import CheckpointReader
from tools.lib.sketches import SIGNS, sums_under_signs

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
    sums = sums_under_signs(name, values)
    return [float(f"{number:.6g}") for number in (float(values.double().norm()), *sums)]


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
