"""Base classes of datasets that build samples from a low-level dataset."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sized
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from megatron.core.config.errors import ConfigError, DataError
from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.core.datasets.corpus import Corpus
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.object_storage_utils import ObjectStorageConfig, is_object_storage_path
from megatron.core.datasets.utils import EpochOrder, Split

LowLevelDataset = Sized | Corpus
Sample = dict[str, Any]  # arrays, tensors and scalars by name, for the collate function


class MegatronDataset(ABC, torch.utils.data.Dataset[Sample]):
    """Samples of one split of one data source.

    ``indices`` are the elements of the low-level dataset that belong to the split.  The files of
    the index cache are named after the md5 of ``unique_description``; both are part of a file
    format that Megatron-LM shares.
    """

    split_unit = "sequences"  # unit that --split divides

    def __init__(
        self,
        dataset: LowLevelDataset,
        dataset_path: str | None,
        indices: np.ndarray,  # with config.index_free a range, which has no array in memory
        num_samples: int | None,
        index_split: Split,
        config: BlendedMegatronDatasetConfig,
    ) -> None:
        self.dataset = dataset
        self.dataset_path = dataset_path
        self.indices = indices
        self.num_samples = num_samples  # minimum number; None for one pass over the data
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
    def numel_low_level_dataset(low_level_dataset: LowLevelDataset) -> int:
        """Return the number of elements that --split divides."""
        assert isinstance(low_level_dataset, Sized), "a corpus has no number while it grows"
        return len(low_level_dataset)

    @staticmethod
    def build_low_level_dataset(
        dataset_path: str | None, config: BlendedMegatronDatasetConfig
    ) -> LowLevelDataset:
        """Open the data source: a .bin/.idx pair on disk or in object storage, or a corpus."""
        settings: dict[str, Any] = {
            "mmap": config.mmap_bin_files,
            "verify_data": config.verify_data,
        }
        if dataset_path is not None and dataset_path in config.corpora:
            return Corpus(config.corpora[dataset_path], dataset_path, **settings)
        cache = config.object_storage_cache_path
        return IndexedDataset(
            given_path(dataset_path),
            object_storage_config=ObjectStorageConfig(cache) if cache else None,
            checks_index=not config.index_free,
            **settings,
        )

    @staticmethod
    def _key_config_attributes() -> list[str]:
        """Return the config fields that determine the samples.

        The order of the names matters: the md5 covers it.
        """
        return ["random_seed", "sequence_length", "split", "split_matrix", "tokenizer"]

    def random_of(self, idx: int, stream: int = 0) -> np.random.Generator:
        """Return the random numbers of sample ``idx``; they depend on seed, split and ``idx`` only.

        Streams of one sample are independent of each other.
        """
        key = (self.config.random_seed * len(Split) + self.index_split.value, idx)
        counter = np.array((0, 0, 0, stream), np.uint64)
        return np.random.Generator(np.random.Philox(key=np.array(key, np.uint64), counter=counter))

    def _check_ids(self, sequence: int, tokens: np.ndarray) -> None:
        """Raise DataError if a token id i64 of a sequence lies outside the vocabulary."""
        vocab_size = self.config.tokenizer.vocab_size
        # As unsigned integers negative ids are large, so one comparison checks both bounds.
        wrong = tokens[tokens.view(np.uint64) >= vocab_size]
        if len(wrong):
            raise DataError(
                f"{self.dataset_path}.bin, sequence {sequence}: token id {wrong[0]} lies outside "
                f"the vocabulary of {vocab_size}: train with the tokenizer that the data was "
                "preprocessed with"
            )

    def _cache_prefix(self, *more: str) -> str:
        """Return the common path prefix of the index cache files."""
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
    """Base of synthetic datasets: no data source, and any requested number of samples."""

    _SAMPLES_WITHOUT_REQUEST = 128

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: LowLevelDataset) -> int:
        """Return a number large enough that no split is empty."""
        return 100_000

    @staticmethod
    def build_low_level_dataset(
        dataset_path: str | None, config: BlendedMegatronDatasetConfig
    ) -> LowLevelDataset:
        """Return an empty source: synthetic data needs no file."""
        return ()

    def __len__(self) -> int:
        return self._SAMPLES_WITHOUT_REQUEST if self.num_samples is None else self.num_samples


def given_path(path: str | None) -> str:
    """Return the path of a data source.  Raises ConfigError without one."""
    if path is None:
        raise ConfigError(
            "no data is named: give --data-path (or data of each split), or --mock-data"
        )
    return path


def describe(unique_identifiers: OrderedDict[str, object]) -> str:
    """Return the text of description.txt, whose hash names the cache files."""
    return json.dumps(unique_identifiers, indent=4, default=lambda part: part.unique_identifiers)


def description_hash(description: str) -> str:
    """Return the md5 in the names of the cache files."""
    return hashlib.md5(description.encode("utf-8"), usedforsecurity=False).hexdigest()


logger = logging.getLogger(__name__)

_MOST_REPLACEMENTS = 100  # so many broken samples in succession end the run


@dataclass(kw_only=True)
class ReplacedSamplesConfig(BlendedMegatronDatasetConfig):
    """Adds what happens to a sample that cannot be used."""

    broken_samples: str = "skip"  # or "fail"


class ReplacedSamples(MegatronDataset):
    """Samples of one split, shuffled in each epoch; a sample's values depend on its number only.

    A sample that cannot be used is replaced by another one, which depends on its number only,
    counted in ``num_broken`` and logged once by each process; with ``broken_samples`` "fail" it
    raises DataError.  ``dataset[None]`` is a sample with a zero loss mask.
    """

    config: ReplacedSamplesConfig
    split_unit = "samples"

    @cached_property
    def _order(self) -> EpochOrder:
        seed = self.config.random_seed * len(Split) + self.index_split.value
        return EpochOrder(len(self.indices), seed)

    @cached_property
    def _broken(self) -> set[int]:
        return set()

    @abstractmethod
    def _content(self, element: int) -> tuple[str, Any]:
        """Return name and content of an element; an error ends the run."""

    @abstractmethod
    def _sample(self, content: Any, number: int) -> Sample:
        """Return the tensors of sample ``number``; raise DataError if it cannot be used."""

    @property
    def num_broken(self) -> int:
        """Number of different samples that this process has found to be unusable."""
        return len(self._broken)

    def __len__(self) -> int:
        return len(self.indices) if self.num_samples is None else self.num_samples

    def __getitem__(self, idx: int | None) -> Sample:
        number = 0 if idx is None else int(idx)
        if not 0 <= number < len(self):
            raise IndexError(f"sample {number} of {len(self)}")
        sample = self._usable(number)
        if idx is None:
            sample["loss_mask"].zero_()
        return sample

    def _usable(self, number: int) -> Sample:
        """Return sample ``number``, or the first usable one of its replacements."""
        place = self._order[number]
        for attempt in range(1, _MOST_REPLACEMENTS + 1):
            element = int(self.indices[place])
            if element not in self._broken:
                name, content = self._content(element)
                try:
                    return self._sample(content, number)
                except DataError as error:
                    self._report(element, name, error)
            place = int(self.random_of(number, attempt).integers(len(self.indices)))
        raise DataError(
            f"the {self.index_split.name} split of {self.dataset_path}: sample {number} and its "
            f"{_MOST_REPLACEMENTS - 1} replacements are unusable; the log names each one"
        )

    def _report(self, element: int, name: str, error: DataError) -> None:
        message = str(error)
        message = message if message.startswith(name) else f"{name}: {message}"
        if self.config.broken_samples == "fail":
            raise DataError(f"{message} (--broken-samples skip would replace it)") from error
        self._broken.add(element)
        logger.warning(
            "%s; another sample replaces it (%d so far in this process)", message, self.num_broken
        )
