"""The base of datasets that cut samples from a low-level dataset."""

from __future__ import annotations

import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from megatron.core.config.errors import ConfigError, DataError
from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.object_storage_utils import ObjectStorageConfig, is_object_storage_path
from megatron.core.datasets.utils import Split

LowLevelDataset = IndexedDataset | Iterable[object]
Sample = dict[str, Any]  # arrays, tensors and numbers by name, as the collate function wants them


class MegatronDataset(ABC, torch.utils.data.Dataset[Sample]):
    """Samples of one split of one source.

    ``indices`` are the elements of the low-level dataset that belong to the split.  The
    description of what was asked for, and its md5, name the index cache: both are part of a file
    format.
    """

    split_unit = "sequences"  # of which splits are made

    def __init__(
        self,
        dataset: LowLevelDataset,
        dataset_path: str | None,
        indices: np.ndarray,
        num_samples: int | None,
        index_split: Split,
        config: BlendedMegatronDatasetConfig,
    ) -> None:
        self.dataset = dataset
        self.dataset_path = dataset_path
        self.indices = indices
        self.num_samples = num_samples  # at least so many; None for one pass over the data
        self.index_split = index_split
        self.config = config
        self.unique_identifiers = OrderedDict[str, object](
            {
                "class": type(self).__name__,
                "dataset_path": dataset_path,
                "num_samples": num_samples,
                "index_split": index_split.name,
            }
        )
        for name in self._key_config_attributes():
            self.unique_identifiers[name] = attrgetter(name)(config)
        self.unique_description = describe(self.unique_identifiers)
        self.unique_description_hash = description_hash(self.unique_description)

    @staticmethod
    @abstractmethod
    def numel_low_level_dataset(low_level_dataset: LowLevelDataset) -> int:
        """How many elements are divided among the splits."""

    @staticmethod
    def build_low_level_dataset(
        dataset_path: str | None, config: BlendedMegatronDatasetConfig
    ) -> LowLevelDataset:
        """Open the source: a .bin/.idx pair, local or in object storage."""
        if dataset_path is None:
            raise ConfigError(
                "no data is named: give --data-path (or data of each split), or --mock-data"
            )
        cache = config.object_storage_cache_path
        storage = ObjectStorageConfig(cache) if cache else None
        return IndexedDataset(
            dataset_path,
            multimodal=False,
            mmap=config.mmap_bin_files,
            object_storage_config=storage,
            verify_data=config.verify_data,
        )

    @staticmethod
    def _key_config_attributes() -> list[str]:
        """Fields of the config that decide what the samples are; the order is part of the md5."""
        return ["random_seed", "sequence_length", "split", "split_matrix", "tokenizer"]

    def _cache_prefix(self, *more: str) -> str:
        """What the names of the index cache's files begin with."""
        name, directory = type(self).__name__, self.config.path_to_cache
        if directory is None:
            assert isinstance(self.dataset, IndexedDataset)
            prefix = self.dataset.path_prefix
            if is_object_storage_path(prefix):
                raise DataError(
                    f"{prefix} lies in object storage: name a local directory for its index with "
                    "--data-cache-path"
                )
            directory = os.path.join(prefix, "cache", f"{name}_indices")
        return os.path.join(directory, "-".join((self.unique_description_hash, name, *more)))

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, idx: int | None) -> Sample: ...


class SyntheticDataset(MegatronDataset):
    """What sets of made-up samples share: there is no source, and as many samples as are wanted."""

    _SAMPLES_WITHOUT_REQUEST = 128

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: LowLevelDataset) -> int:
        """Enough for every split to have a share."""
        return 1_000_000

    @staticmethod
    def build_low_level_dataset(
        dataset_path: str | None, config: BlendedMegatronDatasetConfig
    ) -> LowLevelDataset:
        """Nothing to open."""
        return ()

    def __len__(self) -> int:
        return self._SAMPLES_WITHOUT_REQUEST if self.num_samples is None else self.num_samples


def describe(unique_identifiers: OrderedDict[str, object]) -> str:
    """The text that goes into description.txt and, hashed, into the names of cache files."""
    return json.dumps(unique_identifiers, indent=4, default=lambda part: part.unique_identifiers)


def description_hash(description: str) -> str:
    """The md5 that cache files are named after."""
    return hashlib.md5(description.encode("utf-8"), usedforsecurity=False).hexdigest()
