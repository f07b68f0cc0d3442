"""Datasets of user code (--dataset-type NAME)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Literal, cast

from torch import Tensor
from torch.utils.data import Dataset

from megatron.core.config.errors import ConfigError, DataError
from megatron.training.config.data import DATASETS
from megatron.training.runtime.context import RunContext

Split = Literal["train", "valid", "test"]
Samples = Dataset[Mapping[str, Tensor]]  # with a length
# (run, split, samples to be read or None for one pass) -> dataset, or None without such a split
BuildDataset = Callable[[RunContext, Split, int | None], Samples | None]
_SPLITS: tuple[Split, ...] = ("train", "valid", "test")


def register_dataset(name: str, build: BuildDataset) -> None:
    """Register a dataset for --dataset-type ``name``.  Raise ConfigError if the name is taken.

    ``build`` is called once per split, only on ranks that read data; it must not use collectives.
    """
    if not callable(build):
        raise ConfigError(f"register_dataset({name!r}, ...): {build!r} is no function")
    DATASETS.register(name, build)


def build_user_datasets(
    run: RunContext, name: str, num_samples: Sequence[int | None], *, reads: bool
) -> tuple[Samples | None, Samples | None, Samples | None]:
    """Build the train, validation and test set of dataset ``name``.

    All are None on ranks that do not read.  Raise DataError for a set without length or with too
    few samples, or if there is nothing to train on.
    """
    build = cast(BuildDataset, DATASETS.find(name))  # register_dataset() has checked it
    if not reads:
        return None, None, None
    train, valid, test = (
        build(run, split, n) for split, n in zip(_SPLITS, num_samples, strict=True)
    )
    for split, samples, wanted in zip(_SPLITS, (train, valid, test), num_samples, strict=True):
        _check(run, name, split, samples, wanted)
    return train, valid, test


def _check(
    run: RunContext, name: str, split: Split, samples: Samples | None, wanted: int | None
) -> None:
    if samples is None:
        if split == "train" and not run.config.validation.skip_train:
            raise DataError(f"--dataset-type {name} has no samples to train on: give it some")
        return
    if not isinstance(samples, Sized):
        raise DataError(f"--dataset-type {name}: its {split} set has no length: define __len__")
    repeats = run.config.data.dataloader_type == "cyclic"
    if wanted is not None and len(samples) < wanted and not repeats:
        raise DataError(
            f"--dataset-type {name}: its {split} set has {len(samples)} samples and the run reads "
            f"{wanted}: use --dataloader-type cyclic to read them again in a new order, or fewer "
            "steps"
        )
