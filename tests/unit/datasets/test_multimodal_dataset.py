"""Synthetic samples with images."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from megatron.core.config.errors import ConfigError
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import MockGPTDataset
from megatron.core.datasets.multimodal_dataset import (
    MockMultimodalDataset,
    MultimodalDatasetConfig,
)
from megatron.core.datasets.utils import Split
from tests.support.dataset_files import Tokenizer


def config(**changes: Any) -> MultimodalDatasetConfig:
    given = {
        "random_seed": 1234,
        "sequence_length": 16,
        "tokenizer": Tokenizer(),
        "reset_position_ids": False,
        "reset_attention_mask": False,
        "eod_mask_loss": False,
        "image_h": 6,
        "image_w": 4,
    }
    return MultimodalDatasetConfig(**(given | changes))


def mock(split: Split = Split.train, **changes: Any) -> MockMultimodalDataset:
    return MockMultimodalDataset((), None, np.empty(0, np.int32), 10, split, config(**changes))


def test_the_builder_of_v014_scripts_builds_text_samples_with_an_image() -> None:
    built = BlendedMegatronDatasetBuilder(
        MockMultimodalDataset, [8, 4, 2], lambda: True, config()
    ).build()
    assert [len(dataset) for dataset in built] == [8, 4, 2]
    sample = built[0][3]
    assert sample["image"].shape == (3, 6, 4)
    assert sample["image"].dtype == torch.float32
    text = MockGPTDataset((), None, np.empty(0, np.int32), 8, Split.train, config())[3]
    assert set(sample) == {*text, "image"}
    assert all(torch.equal(sample[name], text[name]) for name in text)


def test_an_image_depends_on_seed_split_and_index_only() -> None:
    image = mock()[3]["image"]
    assert torch.equal(image, mock()[3]["image"])
    others = [mock()[4], mock(random_seed=5)[3], mock(Split.valid)[3]]
    assert not any(torch.equal(image, other["image"]) for other in others)
    assert torch.equal(mock()[None]["image"], mock()[0]["image"])
    assert not mock()[None]["loss_mask"].any()


def test_preprocess_func_returns_the_final_sample() -> None:
    dataset = mock(preprocess_func=lambda sample: {"pixels": sample["image"] * 2})
    assert set(dataset[1]) == {"pixels"}
    assert torch.equal(dataset[1]["pixels"], mock()[1]["image"] * 2)


@pytest.mark.parametrize("size", [None, 0])
def test_a_missing_image_size_is_refused(size: int | None) -> None:
    with pytest.raises(ConfigError, match="image_w"):
        config(image_w=size)
