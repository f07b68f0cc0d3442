"""Text about images: the engine writes what the model's logits say, in every layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from megatron.core.inference.paged_engine.options import EngineOptions
from megatron.core.inference.paged_engine.request import FIRST_ID, RequestError
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.models.multimodal.llava_model import DEFAULT_IMAGE_TOKEN_INDEX
from megatron.inference import LLM, PromptWithImages
from tests.support.ranks import run_ranks
from tests.support.runs import run_gpt

FLAGS = (
    "--model-kind vlm --vision-num-layers 1 --seq-length 20 --img-h 24 --img-w 24 --patch-dim 6 "
    "--train-iters 8 --lr 1e-2 --position-embedding-type rope --max-position-embeddings 128 "
    "--vision-model-type clip --vision-hidden-size 48 --vision-num-attention-heads 6 --use-tiling "
    "--max-num-tiles 4 --use-thumbnail --decoder-seq-length 96"
).split()
NUM_NEW = 6


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    pytest.importorskip("PIL")
    folder = tmp_path_factory.mktemp("vlm")
    run_gpt(folder, *FLAGS, "--save", str(folder / "ck"))
    return str(folder / "ck")


def drawn(seed: int, width: int = 24, height: int = 24) -> Any:
    """Return a PIL image of random blocks."""
    from PIL import Image

    blocks = np.random.default_rng(seed).integers(0, 256, (3, 3, 3), dtype=np.uint8)
    return Image.fromarray(blocks).resize((width, height), Image.Resampling.NEAREST)


def prompts() -> list[Any]:
    """A text, an image before and within a text, one of several tiles, and the same image again."""
    return [
        "5 6 7 8",
        PromptWithImages("5 6 7 8", [drawn(1)]),
        PromptWithImages("9 <image> 5 6 <image>", [drawn(2), drawn(1)]),
        PromptWithImages("5 <image> 7", [drawn(3, width=72, height=24)]),
        PromptWithImages("5 6 7 8", [drawn(1)]),
    ]


def written(rank: int, world_size: int, load: str, layout: dict[str, Any]) -> list[list[int]]:
    options = EngineOptions(max_step_tokens=24, page_size=16)  # prompts are read in parts
    llm = LLM.load(load, device_kind="cpu", options=options, **layout)
    params = SamplingParams(num_tokens_to_generate=NUM_NEW, top_k=1, ignore_eos=True)
    return [[t.token for t in answer.tokens] for answer in llm.generate(prompts(), params)]


def by_logits(rank: int, world_size: int, load: str) -> list[list[int]]:
    """Continue each prompt by the most likely token of a forward pass over all of it."""
    llm = LLM.load(load, device_kind="cpu")
    assert llm.engine.model.encode_images is not None
    model = llm.engine.model.encode_images.__self__  # type: ignore[attr-defined]
    found = []
    for prompt in prompts():
        images: list[torch.Tensor] = []
        ids = llm.tokenizer.tokenize(prompt) if isinstance(prompt, str) else []
        if isinstance(prompt, PromptWithImages):
            assert llm._image_prompts is not None
            rows, read = llm._image_prompts.prompt(prompt.text, prompt.images)
            images = [torch.from_numpy(image.pixels) for image in read]
            firsts = {image.ids[0] for image in read}
            of_text = [DEFAULT_IMAGE_TOKEN_INDEX if i in firsts else i for i in rows]
            ids = [i for i in of_text if i < FIRST_ID]
        new: list[int] = []
        for _ in range(NUM_NEW):
            row = torch.tensor([ids + new])
            with torch.no_grad():
                logits, _ = model(
                    torch.cat(images) if images else None,
                    row,
                    torch.arange(row.shape[1])[None],
                    num_image_tiles=torch.tensor([len(i) for i in images]) if images else None,
                )
            new.append(int(logits[0, -1, : llm.engine.model.vocab_size].argmax()))
        found.append(new)
    return found


@pytest.mark.feature("Generation: text about images, by the same tokens in every layout")
def test_the_engine_writes_what_the_logits_say(saved: str) -> None:
    (wanted,) = run_ranks(by_logits, 1, saved)
    assert len({tuple(tokens) for tokens in wanted}) > 2, "images change what is written"
    for ranks, layout in ((1, {}), (2, {"tensor": 2}), (2, {"tensor": 1, "pipeline": 2})):
        found = run_ranks(written_in, ranks, saved, layout)[0]
        assert found == wanted


def written_in(rank: int, world_size: int, load: str, sizes: dict[str, int]) -> list[list[int]]:
    from megatron.inference.generation import GenerationLayout

    return written(rank, world_size, load, {"layout": GenerationLayout(**sizes)})


def refused(rank: int, world_size: int, load: str) -> list[str]:
    llm = LLM.load(load, device_kind="cpu")
    said = []
    for prompt, params in (
        (PromptWithImages("<image> 5 <image>", [drawn(1)]), SamplingParams()),
        (PromptWithImages("5", ["/nowhere.png"]), SamplingParams()),
        (PromptWithImages("5", [b"no image"]), SamplingParams()),
        (PromptWithImages("5", [drawn(1)]), SamplingParams(return_prompt_log_probs=True)),
        ([FIRST_ID + 3], SamplingParams()),
    ):
        with pytest.raises(RequestError) as error:
            llm.generate(prompt, params)
        said.append(str(error.value))
    return said


def test_bad_images_are_refused_with_their_names(saved: str) -> None:
    (said,) = run_ranks(refused, 1, saved)
    wanted = ("2 tags <image> and 1 images", "/nowhere.png: No such file", "image 0", "no token")
    for text, part in zip(said, wanted, strict=False):
        assert part in text
    assert "token ids of this model are" in said[-1]
