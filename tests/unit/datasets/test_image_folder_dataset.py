"""Folders of images: which images are read, and what becomes of their pixels."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.core.config.errors import DataError
from megatron.core.datasets.image_folder_dataset import (
    ImageFolderDataset,
    ImageFolderDatasetConfig,
    MockImageFolderDataset,
    augment,
    list_images,
)
from megatron.core.datasets.utils import Split

Image = pytest.importorskip("PIL.Image")


def config(**changes: Any) -> ImageFolderDatasetConfig:
    usual = {"random_seed": 3, "sequence_length": 5, "img_h": 8, "img_w": 8, "num_classes": 9}
    return ImageFolderDatasetConfig(**usual | {"tokenizer": None, "split": "1,0,0"} | changes)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Four images of class a, two of b in a folder within it."""
    for name, count in (("a", 4), ("b/inside", 2)):
        (tmp_path / name).mkdir(parents=True)
        for i in range(count):
            image = Image.new("RGB", (12, 16), (60 * i, 40 * count, 9))
            image.save(tmp_path / name / f"{i}.png")
    (tmp_path / "a" / "notes.txt").write_text("no image")
    return tmp_path


def dataset(root: Path, split: Split = Split.train, **changes: Any) -> ImageFolderDataset:
    given = config(**changes)
    images = list_images(str(root), given)
    return ImageFolderDataset(images, str(root), np.arange(len(images)), 20, split, given)


def test_each_epoch_reads_every_image_once(root: Path) -> None:
    samples = dataset(root)
    for epoch in range(3):
        labels = [int(samples[6 * epoch + i]["labels"]) for i in range(6)]
        assert sorted(labels) == [0, 0, 0, 0, 1, 1]


def test_a_sample_depends_on_seed_and_number_only(root: Path) -> None:
    one = dataset(root)
    other = dataset(root)
    for i in (7, 0, 13):
        assert torch.equal(one[i]["images"], other[i]["images"])
    assert not torch.equal(one[0]["images"], dataset(root, random_seed=4)[0]["images"])


def test_validation_images_are_not_augmented(root: Path) -> None:
    samples = dataset(root, Split.valid)
    found = {
        (int(s["labels"]), *s["images"][:, 0, 0].tolist())
        for s in map(samples.__getitem__, range(12))
    }
    assert len(found) == 6
    assert samples[0]["images"].shape == (3, 8, 8)
    for sample in map(samples.__getitem__, range(6)):  # of one color
        assert torch.equal(sample["images"], sample["images"][:, :1, :1].expand(3, 8, 8))


def test_fractions_keep_the_first_classes_and_images(root: Path) -> None:
    assert (
        sorted(label for _, label in list_images(str(root), config(classes_fraction=0.5)))
        == [0] * 4
    )
    half = list_images(str(root), config(data_per_class_fraction=0.5))
    names = sorted(Path(path).relative_to(root).as_posix() for path, _ in half)
    assert names == ["a/0.png", "a/1.png", "b/inside/0.png"]
    least = list_images(str(root), config(classes_fraction=0.01, data_per_class_fraction=0.01))
    assert len(least) == 1


def test_a_damaged_image_is_replaced_and_named(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (root / "a" / "2.png").write_bytes(b"no image")
    samples = dataset(root)
    with caplog.at_level(logging.WARNING):
        assert all(samples[i]["images"].shape == (3, 8, 8) for i in range(12))
    assert samples.num_broken == 1
    assert "a/2.png" in caplog.text
    failing = dataset(root, broken_samples="fail")
    with pytest.raises(DataError, match=r"a/2\.png"):
        [failing[i] for i in range(6)]


def test_folders_without_classes_or_images_are_refused(root: Path) -> None:
    (root / "c").mkdir()
    with pytest.raises(DataError, match="c has no image file"):
        list_images(str(root), config())
    with pytest.raises(DataError, match="has no folders"):
        list_images(str(root / "c"), config())
    with pytest.raises(DataError, match="missing: No such file or directory; give --data-path"):
        list_images(str(root / "missing"), config())
    with pytest.raises(DataError, match="has 3 classes, --num-classes is 2: give --num-classes 3"):
        list_images(str(root), config(num_classes=2))


@pytest.mark.parametrize("size", [(1, 1), (1, 400), (400, 1), (30, 20)])
def test_images_of_any_shape_can_be_augmented(size: tuple[int, int]) -> None:
    image = Image.new("RGB", size, (9, 200, 40))
    for seed in range(20):
        assert augment(image, (6, 4), np.random.default_rng(seed)).size == (6, 4)


def test_a_mock_sample_without_a_number_has_no_loss() -> None:
    samples = MockImageFolderDataset((), None, np.arange(9), 9, Split.train, config())
    assert samples[None]["loss_mask"] == 0
    assert samples[0]["loss_mask"] == 1
    assert torch.equal(samples[0]["images"], samples[None]["images"])
