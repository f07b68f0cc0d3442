"""Text about images by models of Hugging Face: what transformers' models write."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.inference.paged_engine.options import EngineOptions
from megatron.core.inference.paged_engine.request import (
    FIRST_ID,
    PromptImage,
    starts_of_images,
)
from megatron.core.inference.sampling_params import SamplingParams
from megatron.inference import LLM, PromptWithImages
from megatron.inference.generation import GenerationLayout
from megatron.training.conversion.convert import ConversionRequest, convert
from tests.functional.test_vlm_generation import drawn
from tests.support import tolerances
from tests.support.image_families import FAMILIES, image_family
from tests.support.ranks import run_ranks
from tests.unit.conversion.test_vision_language import NEXT, theirs
from tests.unit.models.test_mrope import qwen

NUM_NEW = 8
# Widths and heights of images: of several shapes, all in the limits of both models.
SIZES = [(24, 24), (40, 16), (16, 33), (9, 30)]
LAYOUTS = {"one process": (1, {}), "TP2": (2, {"tensor": 2}), "PP2": (2, {"pipeline": 2})}


def prompts() -> list[Any]:
    """Texts of several lengths with no image, one, the same one again, and several.

    Text stands between images: transformers counts images that touch as one in Qwen2-VL.
    """
    images = [drawn(seed, *size) for seed, size in enumerate(SIZES)]
    return [
        "5 6 7 8 9",
        PromptWithImages("5 6 7 8", [images[0]]),
        PromptWithImages("9 <image> 5 6 <image> 7 8", [images[1], images[2]]),
        PromptWithImages("3 4 5 6 7 8 9 11 <image> 7", [images[3]]),
        PromptWithImages("5 <image> 6 <image> 2 <image>", [images[0], images[0], images[1]]),
        PromptWithImages("5 6 7 8", [images[0]]),
    ]


# Of these one layout of `LAYOUTS` is enough: the engine does the same for all.
FEW = tuple(FAMILIES)
MODELS = {"LLaVA-NeXT": lambda: theirs(NEXT), "Qwen2-VL": qwen}


@pytest.fixture(scope="module", params=[*MODELS, *FEW])
def folders(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, str]:
    """Return a random model of transformers, and our checkpoint of it."""
    pytest.importorskip("PIL")
    model = MODELS[request.param]() if request.param in MODELS else image_family(request.param)
    folder: Path = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder / "theirs")
    convert(
        ConversionRequest(
            source=folder / "theirs",
            target=folder / "ours",
            format="safetensors_dist",
            verify=request.param in MODELS,  # others: tests/unit/conversion/test_image_families.py
        ),
        [].append,
    )
    return model, str(folder / "ours")


def written(
    rank: int, world_size: int, load: str, sizes: dict[str, int], max_step_tokens: int
) -> list[list[tuple[int, float]]]:
    """Return tokens and their log-probabilities for each prompt."""
    options = EngineOptions(max_step_tokens=max_step_tokens, page_size=16)
    llm = LLM.load(load, device_kind="cpu", layout=GenerationLayout(**sizes), options=options)
    params = SamplingParams(
        num_tokens_to_generate=NUM_NEW, top_k=1, ignore_eos=True, return_log_probs=True
    )
    answers = llm.generate(prompts(), params)
    return [[(t.token, t.log_prob) for t in answer.tokens] for answer in answers]


def rows_of_prompts(rank: int, world_size: int, load: str) -> list[tuple[Any, Any]]:
    llm = LLM.load(load, device_kind="cpu")
    assert llm._image_prompts is not None
    found: list[tuple[Any, Any]] = []
    for prompt in prompts():
        if isinstance(prompt, str):
            found.append((llm.tokenizer.tokenize(prompt), ()))
        else:
            found.append(llm._image_prompts.prompt(prompt.text, prompt.images))
    return found


def whole_image(image: PromptImage) -> Tensor:
    """Return the pixels [3, H, W] whose blocks of patches of 4 x 4 pixels are given."""
    _, h, w = image.size
    blocks = torch.from_numpy(image.pixels).view(h // 2, w // 2, 2, 2, 3, 4, 4)
    return blocks.permute(4, 0, 2, 5, 1, 3, 6).reshape(3, 4 * h, 4 * w)


def padded_batch(images: Sequence[Tensor]) -> Tensor:
    """Return images [3, h, w] with zeros to the right and below: [n, 3, H, W]."""
    height, width = (max(image.shape[dim] for image in images) for dim in (1, 2))
    return torch.stack([F.pad(x, (0, width - x.shape[2], 0, height - x.shape[1])) for x in images])


def inputs_of(model: Any, images: Sequence[PromptImage]) -> dict[str, Tensor]:
    """Return the arguments of transformers' models for images."""
    if not images:
        return {}
    pixels = [torch.from_numpy(image.pixels) for image in images]
    if "Mistral3" in type(model).__name__:
        whole = [whole_image(image) for image in images]
        sizes = torch.tensor([image.shape[1:] for image in whole])
        return {"pixel_values": padded_batch(whole), "image_sizes": sizes}
    sizes = torch.tensor([image.size for image in images])
    if not images[0].size:
        return {"pixel_values": torch.cat(pixels)}
    if "LlavaNext" not in type(model).__name__:
        return {"pixel_values": torch.cat(pixels).flatten(0, 1), "image_grid_thw": sizes}
    padded = torch.zeros(len(pixels), max(map(len, pixels)), *pixels[0].shape[1:])
    for row, each in zip(padded, pixels, strict=True):
        row[: len(each)] = each
    return {"pixel_values": padded, "image_sizes": sizes[:, 2:]}


@torch.no_grad()
def of_transformers(
    model: Any, rows: Sequence[int], images: Sequence[PromptImage]
) -> list[tuple[int, float]]:
    """Return the most likely next tokens with their log-probabilities, without a cache.

    The cache of transformers takes what follows an image at the end of a prompt for more of it.
    """
    token = model.config.image_token_id
    ids = [token if i >= FIRST_ID else i for i in rows]
    more = inputs_of(model, images)
    if "Mistral3" in type(model).__name__:  # tokens of text end the rows of an image
        for start, image in zip(starts_of_images(np.array(rows)), images, strict=True):
            step = image.size[2] // 2 + 1
            ends = range(start + step - 1, start + image.num_rows, step)
            for place in ends:
                ids[place] = 13 if place == ends[-1] else 12
    found = []
    for _ in range(NUM_NEW):
        row = torch.tensor([ids])
        name = "mm_token_type_ids" if "image_grid_thw" in more else "token_type_ids"
        if name in signature(model.forward).parameters:
            more[name] = (row == token).int()
        log_probs = model(input_ids=row, use_cache=False, **more).logits[0, -1].log_softmax(-1)
        ids.append(int(log_probs.argmax()))
        found.append((ids[-1], float(log_probs[ids[-1]])))
    return found


@pytest.mark.feature(
    "Generation: LLaVA-NeXT, Qwen2-VL, Gemma-3, Qwen3-VL, Qwen3.5 and Mistral 3 write the tokens "
    "of transformers' models about images"
)
def test_tokens_are_those_of_transformers_in_every_layout(folders: tuple[Any, str]) -> None:
    model, load = folders
    (given,) = run_ranks(rows_of_prompts, 1, load)
    wanted = [of_transformers(model, ids, images) for ids, images in given]
    assert len({tuple(t for t, _ in each) for each in wanted}) > 3, "images change what is written"
    is_few = any(type(model).__name__.startswith(FAMILIES[name][0]) for name in FEW)
    limits = (13,) if is_few else (13, 512)  # prompts, and images, are read in parts
    for ranks, sizes in [LAYOUTS["PP2"]] if is_few else LAYOUTS.values():
        for max_step_tokens in limits:
            found = run_ranks(written, ranks, load, sizes, max_step_tokens)[0]
            for mine, expected in zip(found, wanted, strict=True):
                assert [t for t, _ in mine] == [t for t, _ in expected]
                torch.testing.assert_close(
                    torch.tensor([p for _, p in mine]),
                    torch.tensor([p for _, p in expected]),
                    **tolerances.LOGITS,
                )
