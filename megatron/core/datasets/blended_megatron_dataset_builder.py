"""Build the training, validation and test datasets that a config describes.

No function uses a collective.  Every rank that builds reads the same files and gets the same
samples.  If index arrays are missing, one process builds them and the others wait for the files.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from math import ceil
from typing import Any

import numpy as np

from megatron.core.config.errors import ConfigError, DataError
from megatron.core.datasets.blended_dataset import BlendedDataset, Oversampled
from megatron.core.datasets.blended_megatron_dataset_config import (
    BlendedMegatronDatasetConfig,
    SplitMatrix,
)
from megatron.core.datasets.corpus import Corpus
from megatron.core.datasets.megatron_dataset import LowLevelDataset, MegatronDataset
from megatron.core.datasets.utils import Blend, Split, normalize

logger = logging.getLogger(__name__)

Sizes = Sequence[int | None]  # numbers of samples for train, valid and test
_MOST_SEQUENCES = np.iinfo(np.int32).max  # index files store sequence numbers as int32

TopLevelDataset = MegatronDataset | BlendedDataset | list[MegatronDataset] | None


class BlendedMegatronDatasetBuilder:
    """Builder of the three datasets of class ``cls``, with at least ``sizes`` samples each.

    A size of None requests one pass over the data, 0 requests no dataset.  On ranks where
    ``is_built_on_rank()`` is False, ``build`` returns None for all three.
    """

    def __init__(
        self,
        cls: type[MegatronDataset],
        sizes: Sizes,
        is_built_on_rank: Callable[[], bool],
        config: BlendedMegatronDatasetConfig,
    ) -> None:
        assert len(sizes) == len(Split), f"{len(sizes)} sizes for {len(Split)} splits"
        self.cls = cls
        self.sizes: list[int | None] = list(sizes)
        self.is_built_on_rank = is_built_on_rank
        self.config = config
        if config.full_validation:
            self.sizes[Split.valid.value] = None

    def build(self) -> list[TopLevelDataset]:
        """Return [train, valid, test]; each is a dataset, a BlendedDataset or None.

        With ``multiple_validation_sets``, valid is a list of datasets.  Raises DataError if a
        requested split is empty, or a file is missing or damaged.  Not a collective.
        """
        if not self.is_built_on_rank():
            return [None] * len(Split)
        config = self.config
        if config.mock:
            assert config.split_matrix is not None
            return list(self._build_prefix(None, config.split_matrix, self.sizes))
        if config.blend is not None:
            assert config.split_matrix is not None
            return self._build_blend(config.blend, config.split_matrix)
        assert config.blend_per_split is not None
        built: list[TopLevelDataset] = [None] * len(Split)
        for i, blend in enumerate(config.blend_per_split):
            if blend is None:
                logger.info("no data is given for the %s split", Split(i).name)
                continue
            whole: SplitMatrix = [None] * len(Split)
            whole[i] = (0.0, 1.0)
            built[i] = self._build_blend(blend, whole)[i]
        return built

    def _build_blend(self, blend: Blend, split: SplitMatrix) -> list[TopLevelDataset]:
        prefixes, weights = blend
        requested = [size if part else 0 for size, part in zip(self.sizes, split, strict=True)]
        if len(prefixes) == 1 and weights is None:
            train, valid, test = self._build_prefix(prefixes[0], split, requested)
            is_separate = self.config.multiple_validation_sets and valid is not None
            return [train, [valid] if is_separate else valid, test]  # type: ignore[list-item]
        if weights is not None:
            weights = normalize(weights)
            sizes = [self._sizes_of(weight, requested) for weight in weights]
        else:
            sizes = [[None if size != 0 else 0 for size in requested] for _ in prefixes]
        per_split = zip(*self._build_prefixes(prefixes, split, sizes), strict=True)
        return [
            self._blend_split(i, [d for d in datasets if d is not None], weights)
            if requested[i] != 0
            else None
            for i, datasets in enumerate(per_split)
        ]

    def _sizes_of(self, weight: float, requested: Sizes) -> list[int | None]:
        """Return the samples to build, per split, for a dataset with this blend weight.

        The surplus is needed because the greedy order of ``BlendedDataset`` may take slightly more
        samples from a dataset than its weight times the total.
        """
        if None in requested:
            raise ConfigError(
                "--full-validation reads every data set once and cannot apply blend weights: give "
                "the paths without weights, or separate validation data with --valid-data-path"
            )
        surplus = self.config.mid_level_dataset_surplus
        return [ceil(ceil(size * weight) * (1 + surplus)) for size in requested if size is not None]

    def _blend_split(
        self, i: int, datasets: list[MegatronDataset], weights: list[float] | None
    ) -> TopLevelDataset:
        if self.config.multiple_validation_sets and i == Split.valid.value:
            return datasets
        size = self.sizes[i]
        if weights is not None:
            assert size is not None
            total = sum(ceil(size * weight) for weight in weights)
            try:
                return BlendedDataset(datasets, weights, total, self.config)
            except Oversampled as short:
                # The surplus was too small for the rounding of many small weights.  The
                # error holds the exact numbers: build those and blend again.
                grown = [
                    type(d)(d.dataset, d.dataset_path, d.indices, n, d.index_split, d.config)
                    if n > len(d)
                    else d
                    for d, n in zip(datasets, short.wanted, strict=True)
                ]
                return BlendedDataset(grown, weights, total, self.config)
        counts = [len(dataset) for dataset in datasets]
        if size is not None and size > sum(counts):
            logger.warning(
                "the %s data paths have no weights, so the set has each of their samples once: %d "
                "samples, of %d asked for; weights would repeat data",
                Split(i).name,
                sum(counts),
                size,
            )
        total_or_all = None if size is None else min(size, sum(counts))
        return BlendedDataset(datasets, counts, total_or_all, self.config)

    def _build_prefixes(
        self, prefixes: list[str], split: SplitMatrix, sizes: Sequence[Sizes]
    ) -> list[list[MegatronDataset | None]]:
        """Build every dataset of a blend, in --num-dataset-builder-threads threads."""
        threads = self.config.num_dataset_builder_threads
        if threads <= 1 or len(prefixes) == 1:
            return [self._build_prefix(p, split, s) for p, s in zip(prefixes, sizes, strict=True)]
        with ThreadPoolExecutor(max_workers=threads) as pool:
            return list(pool.map(self._build_prefix, prefixes, repeat(split), sizes))

    def _build_prefix(
        self, prefix: str | None, split: SplitMatrix, sizes: Sizes
    ) -> list[MegatronDataset | None]:
        source = self.cls.build_low_level_dataset(prefix, self.config)
        return [self._build_split(source, prefix, i, split[i], sizes[i]) for i in range(len(Split))]

    def _build_split(
        self,
        source: LowLevelDataset,
        prefix: str | None,
        i: int,
        fractions: tuple[float, float] | None,
        size: int | None,
    ) -> MegatronDataset | None:
        if fractions is None or size == 0:
            return None
        if isinstance(source, Corpus):
            part: Any = fractions
            return self.cls(source, prefix, part, size, Split(i), self.config)
        count = self.cls.numel_low_level_dataset(source)
        begin, end = (int(round(fraction * float(count))) for fraction in fractions)
        if begin == end:
            wanted = "one pass" if size is None else f"{size} samples"
            raise DataError(
                f"the {Split(i).name} split of {prefix} is empty: its share of {count} "
                f"{self.cls.split_unit} is {begin} to {end} (--split {self.config.split}), and the "
                f"run asks for {wanted}; give it a larger share, or data of its own, or no use "
                "(--eval-iters 0)"
            )
        if self.config.index_free:
            whole: Any = range(begin, end)
            return self.cls(source, prefix, whole, size, Split(i), self.config)
        if count > _MOST_SEQUENCES:
            raise DataError(
                f"{prefix} has {count} sequences, an index holds at most {_MOST_SEQUENCES}: "
                "divide it into several data paths, or use --index-free"
            )
        indices = np.arange(begin, end, dtype=np.int32)
        return self.cls(source, prefix, indices, size, Split(i), self.config)
