"""Blend several datasets in proportion to weights, always sampling the largest deficit next."""

from __future__ import annotations

import logging
import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from megatron.core.config.errors import DataError
from megatron.core.datasets import helpers
from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.core.datasets.index_cache import cached_arrays
from megatron.core.datasets.index_free import BlendOrder
from megatron.core.datasets.megatron_dataset import (
    MegatronDataset,
    Sample,
    describe,
    description_hash,
)
from megatron.core.datasets.utils import normalize
from megatron.core.progress import Progress

logger = logging.getLogger(__name__)

_MOST_DATASETS = np.iinfo(np.int16).max  # dataset_index is i16
_PIECE = 1 << 20


class PhasedDataset(torch.utils.data.Dataset[Sample]):
    """Datasets one after the other; phase i begins at sample ``starts[i]``, with its first sample.

    None stands for the dataset of a phase that is over.  The last phase has no end.
    """

    def __init__(self, datasets: Sequence[Any], starts: Sequence[int]) -> None:
        self.datasets = datasets
        self.starts = starts

    def __len__(self) -> int:
        return self.starts[-1] + len(self.datasets[-1])

    def __getitem__(self, idx: int | None) -> Sample:
        phase = len(self.starts) - 1 if idx is None else bisect_right(self.starts, idx) - 1
        data = self.datasets[phase]
        assert data is not None, f"sample {idx} of a phase that is over"
        sample: Sample = data[None if idx is None else idx - self.starts[phase]]
        return sample


class Oversampled(DataError):
    """A blend needs more samples than a dataset has; ``wanted``: number needed per dataset."""

    def __init__(self, message: str, wanted: list[int]) -> None:
        super().__init__(message)
        self.wanted = wanted


class BlendedDataset(torch.utils.data.Dataset[Sample]):
    """``size`` samples taken from ``datasets`` in proportion to ``weights``.

    If ``size`` is None, ``weights`` are the dataset lengths and every sample is taken once.  Items
    have an added key ``dataset_id``.  Raises Oversampled (a DataError) if a dataset has fewer
    samples than the blend takes from it.
    """

    def __init__(
        self,
        datasets: Sequence[MegatronDataset],
        weights: Sequence[float] | Sequence[int],
        size: int | None,
        config: BlendedMegatronDatasetConfig,
    ) -> None:
        assert 0 < len(datasets) <= _MOST_DATASETS, f"{len(datasets)} datasets in a blend"
        assert len(datasets) == len(weights), f"{len(datasets)} datasets, {len(weights)} weights"
        assert len({dataset.index_split for dataset in datasets}) == 1, "datasets of one split"
        assert all(weight > 0 for weight in weights), f"weights above 0, not {list(weights)}"
        self.datasets = list(datasets)
        self.split = datasets[0].index_split
        self.weights = list(weights) if size is None else normalize(weights)
        self.size = size
        self.config = config
        self.unique_identifiers = OrderedDict[str, object](
            {
                "class": type(self).__name__,
                "datasets": [dataset.unique_identifiers for dataset in self.datasets],
                "split": self.split.name,
                "weights": self.weights,
                "size": size,
            }
        )
        self.unique_description = describe(self.unique_identifiers)
        self.unique_description_hash = description_hash(self.unique_description)
        self._order: BlendOrder | None = None
        if config.index_free:
            is_counted = all(isinstance(weight, int) for weight in weights)
            period = int(sum(weights)) if is_counted else None
            if config.has_exact_shares and size is not None:
                period = size
            self._order = BlendOrder(weights, period)
            return
        self.dataset_index, self.dataset_sample_index = self._load_or_build()
        self._check_supply()

    def __len__(self) -> int:
        if self._order is not None:
            return int(sum(self.weights)) if self.size is None else self.size
        return len(self.dataset_index)

    def __getitem__(self, idx: int | None) -> Sample:
        if idx is None:
            return {"dataset_id": 0, **self.datasets[0][None]}
        dataset_id, number = self.locate(idx)
        return {"dataset_id": dataset_id, **self.datasets[dataset_id][number]}

    def locate(self, idx: int) -> tuple[int, int]:
        """Return the number of the dataset of sample ``idx``, and of the sample in it."""
        if self._order is not None:
            return self._order[idx]
        return int(self.dataset_index[idx]), int(self.dataset_sample_index[idx])

    def _check_supply(self) -> None:
        taken = np.zeros(len(self.datasets), np.int64)
        for at in range(0, len(self), _PIECE):  # in chunks: bincount copies its input
            taken += np.bincount(self.dataset_index[at : at + _PIECE], minlength=len(self.datasets))
        for dataset, wanted in zip(self.datasets, taken.tolist(), strict=True):
            if wanted > len(dataset):
                raise Oversampled(
                    f"the {self.split.name} blend takes {wanted} samples from "
                    f"{dataset.dataset_path}, which offers {len(dataset)}: "
                    "raise --mid-level-dataset-surplus "
                    f"(now {self.config.mid_level_dataset_surplus:g})",
                    taken.tolist(),
                )
            logger.info(
                "the %s blend takes %d of %d samples from %s",
                self.split.name,
                wanted,
                len(dataset),
                dataset.dataset_path,
            )

    def _load_or_build(self) -> Sequence[np.ndarray]:
        """Load both index arrays from --data-cache-path, or build them.  No collective."""
        directory = self.config.path_to_cache
        if directory is None:
            return self._build()
        stem = f"{self.unique_description_hash}-{type(self).__name__}-{self.split.name}"
        prefix = os.path.join(directory, stem)
        shapes: dict[str, tuple[int, ...]] = {"dataset_index": (), "dataset_sample_index": ()}
        return cached_arrays(prefix, self.unique_description, shapes, self._build)

    def _build(self) -> tuple[np.ndarray, np.ndarray]:
        size = int(sum(self.weights)) if self.size is None else self.size
        dataset_index = np.zeros(size, np.int16)
        dataset_sample_index = np.zeros(size, np.int64)
        arrays = dataset_index, dataset_sample_index
        count = len(self.weights)
        with Progress(f"blending {count} datasets"):
            if self.size is None:
                sizes = np.array(self.weights, np.int64)
                helpers.build_exhaustive_blending_indices(*arrays, sizes, count)
            else:
                helpers.build_blending_indices(*arrays, np.array(self.weights), count, size)
        return arrays
