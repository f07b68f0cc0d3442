"""Splits, blends named on the command line, and weights."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from enum import Enum

import numpy as np

from megatron.core.config.errors import ConfigError

logger = logging.getLogger(__name__)

# path prefixes and, where given, how much of each
Blend = tuple[list[str], list[float] | None]


class Split(Enum):
    """The three uses of data; the value is the place in lists of three."""

    train = 0
    valid = 1
    test = 2


def compile_helpers() -> None:
    """Nothing: the helper is compiled when the package is installed, numpy stands in without it."""
    logger.info("the dataset helper is compiled at installation, there is nothing to compile now")


def normalize(weights: Sequence[float]) -> list[float]:
    """``weights`` divided by their sum."""
    array = np.array(weights, dtype=np.float64)
    return [float(share) for share in array / np.sum(array)]


def get_blend_from_list(blend: Sequence[str] | None) -> Blend | None:
    """``w1 p1 w2 p2 ...`` or ``p1 p2 ...`` as (prefixes, weights or None).

    An odd number of words, or pairs that all begin with something that is no number, are prefixes.
    """
    if not blend:
        return None
    words = [str(word) for word in blend]
    if len(words) % 2 == 1:
        return words, None
    weights = [_number(word) for word in words[::2]]
    known = [weight for weight in weights if weight is not None]
    if not known:
        return words, None
    if len(known) != len(weights):
        wrong = words[::2][weights.index(None)]
        raise ConfigError(
            f"data paths are given as weight and prefix in turn, but {wrong!r} stands where a "
            "weight is expected: give every prefix a weight, or none of them"
        )
    return words[1::2], known


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None
