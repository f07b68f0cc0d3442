"""Prompts with images: the tokens that a sample of training has for the same conversation."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.image_text_dataset import ImageTextDataset, ImageTextDatasetConfig
from megatron.core.datasets.images import ImageSettings
from megatron.core.inference.paged_engine.request import FIRST_ID, PLACE_BITS
from megatron.inference.image_prompts import ImageInput, ImagePrompts
from megatron.training.tokenizer import TokenizerSpec, create_tokenizer
from tests.unit.datasets.test_tar_shards import write_tar

pytest.importorskip("transformers")

ROWS_PER_TILE = 3
QUESTION = "<image>\nWhat is in the picture?"


def picture(width: int, height: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), "red").save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize("has_tags", [False, True])
@pytest.mark.parametrize("size", [(8, 8), (24, 8)])
def test_a_prompt_has_the_tokens_of_a_training_sample(
    tmp_path: Path, has_tags: bool, size: tuple[int, int]
) -> None:
    from examples.multimodal.quickstart import draw_samples

    draw_samples.write_tokenizer(tmp_path / "tokenizer")
    tokenizer = create_tokenizer(
        TokenizerSpec(
            tokenizer_type="MultimodalTokenizer",
            tokenizer_model=str(tmp_path / "tokenizer"),
            tokenizer_prompt_format="qwen2p5",
        )
    )
    settings = ImageSettings(
        img_h=8, img_w=8, tiling="dynamic", max_num_tiles=4, use_thumbnail=True
    )
    turns = [{"from": "human", "value": QUESTION}, {"from": "gpt", "value": "a red square"}]
    files = [
        ("0.png", picture(*size)),
        ("0.json", json.dumps({"conversations": turns}).encode()),
    ]
    config = ImageTextDatasetConfig(
        random_seed=1,
        sequence_length=64,
        blend=([write_tar(tmp_path / "one.tar", files)], None),
        split="1",
        tokenizer=tokenizer,
        images=settings,
        use_tile_tags=has_tags,
        broken_samples="fail",
    )
    (data, _, _) = BlendedMegatronDatasetBuilder(
        ImageTextDataset, [None, 0, 0], lambda: True, config
    ).build()
    assert isinstance(data, ImageTextDataset)
    sample = data[0]

    prompts = ImagePrompts(ImageInput(settings, ROWS_PER_TILE, has_tags), tokenizer)
    ids, images = prompts.prompt([{"role": "user", "content": QUESTION}], [picture(*size)])
    places = [i for i in ids if i >= FIRST_ID and i % (1 << PLACE_BITS) == 0]
    assert len(places) == len(images) == int((sample["num_tiles"] > 0).sum())
    tokens = [-200 if i in places else i for i in ids if i < FIRST_ID or i in places]
    assert tokens == sample["tokens"].tolist()[: len(tokens)]
    pixels = np.concatenate([image.pixels for image in images])
    np.testing.assert_array_equal(pixels, sample["images"].numpy())
    assert sum(image.num_rows for image in images) == ROWS_PER_TILE * len(pixels)
