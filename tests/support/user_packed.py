"""The same samples of text and images, two in a row (``packed``) or each in a row (``apart``)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from megatron.core.datasets.packing import pack_samples
from megatron.training.data import register_dataset

IMAGE = -200
LENGTHS = (9, 14, 11, 12, 6, 16, 10, 7)  # tokens of the samples; two of them fit a row
VOCABULARY = 100


def sample(number: int, num_tokens: int, image: tuple[int, int]) -> dict[str, Tensor]:
    """Return a sample with an image as its second token, the third has none."""
    length = LENGTHS[number % len(LENGTHS)]
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(0, VOCABULARY, (length + 1,), generator=generator)
    tokens = torch.zeros(num_tokens, dtype=torch.int64)
    tokens[:length] = ids[:-1]
    labels = torch.zeros_like(tokens)
    labels[:length] = ids[1:]
    mask = torch.zeros(num_tokens)
    mask[:length] = (torch.rand(length, generator=generator) < 0.8).float()
    num_tiles = torch.full((num_tokens,), -1)
    num_tiles[:length] = 0
    has_image = number % 3 != 2
    if has_image:
        tokens[1] = IMAGE
        num_tiles[1] = 1
    return {
        "tokens": tokens,
        "labels": labels,
        "loss_mask": mask,
        "position_ids": torch.arange(num_tokens),
        "num_tiles": num_tiles,
        "images": torch.randn(int(has_image), 3, *image, generator=generator),
    }


class Samples(Dataset):
    """Samples, ``per_row`` in each row."""

    def __init__(self, run: Any, num_samples: int, per_row: int) -> None:
        vision = run.config.vision
        self.num_tokens = vision.dataloader_seq_length + 1
        self.image = vision.img_h, vision.img_w
        self.num_samples = num_samples
        self.per_row = per_row

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        numbers = range(index * self.per_row, (index + 1) * self.per_row)
        found = [sample(number, self.num_tokens, self.image) for number in numbers]
        return found[0] if self.per_row == 1 else pack_samples(found, self.num_tokens, 0)


def rows_of(per_row: int) -> Any:
    def build(run: Any, split: str, num_samples: int) -> Samples | None:
        return Samples(run, num_samples, per_row) if split == "train" else None

    return build


register_dataset("apart", rows_of(1))
register_dataset("packed", rows_of(2))
