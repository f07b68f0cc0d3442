"""Positions of M-RoPE in generation: those that training has for the same row."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from megatron.core.inference.paged_engine.cache import SlotPositions
from megatron.core.inference.paged_engine.request import PromptImage, starts_of_images
from megatron.core.inference.paged_engine.step_plan import Admission
from megatron.core.models.multimodal.splicing import splice

# Patches of images along time, height and width, by their places in a text of 7 tokens.
TEXTS = [{}, {0: (1, 4, 6)}, {2: (1, 8, 2), 3: (1, 2, 2)}, {1: (2, 4, 4), 6: (1, 4, 10)}]


def image_of(size: tuple[int, int, int]) -> PromptImage:
    count = int(np.prod(size)) // 4
    return PromptImage(np.full((count, 4, 6), len(str(size)), np.float32), count, size)


@pytest.mark.parametrize("images", TEXTS)
def test_rows_have_the_positions_of_training(images: dict[int, tuple[int, int, int]]) -> None:
    is_image = torch.tensor([[i in images for i in range(10)]])  # the last three are generated
    sizes = torch.zeros(1, 10, 3, dtype=torch.int64)
    for place, (t, h, w) in images.items():
        sizes[0, place] = torch.tensor([t, h // 2, w // 2])
    where = splice(is_image, sizes.prod(-1))
    wanted = where.grid_positions(sizes)[:, 0].numpy()
    found = {place: image_of(size) for place, size in images.items()}
    ids = [i for place in range(7) for i in (found[place].ids if place in found else [5])]
    starts = tuple(starts_of_images(np.array(ids)))
    slots = SlotPositions(3, has_grid=True)
    slots.admit(Admission(0, {}))
    images = tuple(found.values())
    slots.admit(Admission(2, {}, image_starts=starts, images=images))
    rows = np.arange(len(ids) + 3)
    both = slots.grid(np.concatenate([rows, rows]), np.repeat([2, 0], len(rows)))
    np.testing.assert_array_equal(both[:, : len(rows)], wanted)
    np.testing.assert_array_equal(both[:, len(rows) :], np.tile(rows, (3, 1)))
    slots.admit(Admission(2, {}))
    np.testing.assert_array_equal(slots.grid(rows, np.full(len(rows), 2)), np.tile(rows, (3, 1)))


def test_an_image_is_the_same_after_json() -> None:
    image = PromptImage(np.random.default_rng(1).random((6, 4, 8), np.float32), 6, (1, 4, 6))
    found = PromptImage.from_json(json.loads(json.dumps(image.to_json())))
    assert (found.num_rows, found.size, found.key) == (6, (1, 4, 6), image.key)
    np.testing.assert_array_equal(found.pixels, image.pixels)
    assert image.key != PromptImage(image.pixels, 6, (1, 6, 4)).key
