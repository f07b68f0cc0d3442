"""Base of datasets of files whose unusable samples are replaced by others."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Iterable, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron.core.config.errors import ConfigError, DataError
from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.core.datasets.epoch_order import EpochOrder
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.megatron_dataset import LowLevelDataset, MegatronDataset, Sample
from megatron.core.datasets.utils import Split

logger = logging.getLogger(__name__)

_MOST_REPLACEMENTS = 100  # so many broken samples in succession end the run


@dataclass(kw_only=True)
class ReplacedSamplesConfig(BlendedMegatronDatasetConfig):
    """Adds what happens to a sample that cannot be used."""

    broken_samples: str = "skip"  # or "fail"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.broken_samples not in ("skip", "fail"):
            raise ConfigError(f"--broken-samples {self.broken_samples}: give skip or fail")


class ReplacedSamples(MegatronDataset):
    """Samples of one split, shuffled in each epoch; a sample's values depend on its number only.

    A sample that cannot be used is replaced by another one, which depends on its number only,
    counted in ``num_broken`` and logged once by each process; with ``broken_samples`` "fail" it
    raises DataError.  ``dataset[None]`` is a sample with a zero loss mask.
    """

    config: ReplacedSamplesConfig
    split_unit = "samples"

    def __init__(
        self,
        dataset: IndexedDataset | Iterable[object],
        dataset_path: str | None,
        indices: np.ndarray,
        num_samples: int | None,
        index_split: Split,
        config: ReplacedSamplesConfig,
    ) -> None:
        super().__init__(dataset, dataset_path, indices, num_samples, index_split, config)
        seed = config.random_seed * len(Split) + index_split.value
        self._order = EpochOrder(len(indices), seed)
        self._broken: set[int] = set()

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: LowLevelDataset) -> int:
        """Return the number of elements."""
        assert isinstance(low_level_dataset, Sized)
        return len(low_level_dataset)

    @classmethod
    def build_low_level_dataset(
        cls, dataset_path: str | None, config: BlendedMegatronDatasetConfig
    ) -> LowLevelDataset:
        """Open the elements of a path.  Raises ConfigError without one."""
        if dataset_path is None:
            raise ConfigError("no data is named: give --data-path, or --mock-data")
        return cls._opened(dataset_path, config)

    @staticmethod
    @abstractmethod
    def _opened(dataset_path: str, config: BlendedMegatronDatasetConfig) -> LowLevelDataset:
        """Open the elements of a path."""

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
