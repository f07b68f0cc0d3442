"""Base config of every dataset: data paths, splits, blends and caches."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import isfinite
from typing import Any

from megatron.core.config.errors import ConfigError
from megatron.core.config.parse import unquoted
from megatron.core.datasets.utils import Blend, Split, normalize
from megatron.core.optional import lazy_exports

# Scripts also import GPTDatasetConfig from this module.  Lazy: its module imports this one.
__getattr__ = lazy_exports(__name__, {"GPTDatasetConfig": "megatron.core.datasets.gpt_dataset"})

# per split: (begin, end) as fractions of the data, or None if the split gets no data
SplitMatrix = list[tuple[float, float] | None]


@dataclass(kw_only=True)
class BlendedMegatronDatasetConfig:
    """Config of data sources and sample length; never changed after construction.

    Not frozen, because users derive plain dataclasses from it.  Give ``blend`` and ``split``, or
    ``blend_per_split`` (train, valid, test); with neither, data is synthetic (``mock``).
    """

    random_seed: int
    sequence_length: int  # tokens in a sample
    blend: Blend | None = None
    blend_per_split: list[Blend | None] | None = None
    multiple_validation_sets: bool | None = None  # evaluate each validation set separately
    full_validation: bool | None = None  # one complete pass over the validation data
    split: str | None = None  # weights of train, valid and test: "969, 30, 1"
    split_matrix: SplitMatrix | None = field(init=False, default=None)
    num_dataset_builder_threads: int = 1
    path_to_cache: str | None = None
    mmap_bin_files: bool = True
    object_storage_cache_path: str | None = None  # local directory for remote .idx files
    mock: bool = field(init=False, default=False)
    tokenizer: Any = None
    mid_level_dataset_surplus: float = 0.005  # extra share of samples per blended dataset
    verify_data: bool = False  # check .bin against the checksums in .crc
    index_free: bool = False  # compute the order of samples when they are read
    has_exact_shares: bool = False  # index_free blends have these after all of their samples
    # Data path -> directory of its shards, for text that is tokenized during training (`Corpus`).
    corpora: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.blend_per_split is not None and any(self.blend_per_split):
            self._check_blend_per_split()
        else:
            if self.blend is None:
                self.mock = True
                self.split = self.split or "1,1,1"
            else:
                _check_blend(self.blend)
            if self.split is None:
                raise ConfigError(
                    "--data-path needs --split, the weights of training, validation and test data"
                )
            self.split_matrix = convert_split_vector_to_split_matrix(
                parse_and_normalize_split(self.split)
            )
        if self.multiple_validation_sets:
            self._check_multiple_validation_sets()

    def _check_blend_per_split(self) -> None:
        assert self.blend_per_split is not None
        if self.blend is not None or self.split is not None:
            given = "--data-path" if self.blend is not None else f"--split {self.split}"
            raise ConfigError(f"{given} goes with one source, data paths per split were given too")
        if len(self.blend_per_split) != len(Split):
            raise ConfigError(
                f"data paths per split are three (train, valid, test), not "
                f"{len(self.blend_per_split)}"
            )
        for blend in self.blend_per_split:
            if blend is not None:
                _check_blend(blend)

    def _check_multiple_validation_sets(self) -> None:
        if not self.full_validation:
            raise ConfigError("--multiple-validation-sets needs --full-validation")
        per_split = self.blend_per_split
        blend = per_split[Split.valid.value] if per_split else self.blend
        if blend is not None and blend[1] is not None:
            raise ConfigError(
                f"--multiple-validation-sets evaluates each set by itself and cannot apply the "
                f"weights {blend[1]}: give the paths without weights"
            )


def _check_blend(blend: Blend) -> None:
    prefixes, weights = blend
    if weights is None:
        return
    if len(weights) != len(prefixes):
        raise ConfigError(f"a blend of {len(prefixes)} data paths has {len(weights)} weights")
    for prefix, weight in zip(prefixes, weights, strict=True):
        if not (isfinite(weight) and weight > 0):
            raise ConfigError(
                f"the weight of {prefix} is {weight:g}: give it a weight above 0, or remove the "
                "path"
            )


def parse_and_normalize_split(split: str) -> list[float]:
    """Parse ``"969, 30, 1"`` into three fractions that sum to 1; missing weights are 0."""
    words = re.split(r"[,/\s]+", unquoted(split).strip(", /"))
    try:
        weights = [float(word) for word in words]
    except ValueError:
        weights = []
    is_usable = all(isfinite(weight) and weight >= 0 for weight in weights)
    if not (1 <= len(weights) <= len(Split) and is_usable and sum(weights) > 0):
        raise ConfigError(
            f"--split {split!r}: give up to three weights, none negative and not all 0, "
            "such as 969,30,1"
        )
    return normalize(weights + [0.0] * (len(Split) - len(weights)))


def convert_split_vector_to_split_matrix(
    vector_a: list[float], vector_b: list[float] | None = None
) -> SplitMatrix:
    """Return the range of the data for each split, such as [(0, 0.9), (0.9, 0.95), (0.95, 1)].

    With ``vector_b``, return for each split the overlap of its ranges under both vectors, or None
    where they do not overlap.
    """
    ranges_a = _ranges(vector_a)
    ranges_b = _ranges(vector_b) if vector_b is not None else ranges_a
    overlaps: SplitMatrix = []
    for (begin_a, end_a), (begin_b, end_b) in zip(ranges_a, ranges_b, strict=True):
        begin, end = max(begin_a, begin_b), min(end_a, end_b)
        overlaps.append((begin, end) if begin < end else None)
    return overlaps


def _ranges(vector: list[float]) -> list[tuple[float, float]]:
    # The first bound must stay the integer 0 (not 0.0): index cache descriptions contain it.
    return list(pairwise([0, *accumulate(vector)]))
