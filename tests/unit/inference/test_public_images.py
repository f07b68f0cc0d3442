"""Scripts written for Megatron Core that generate text about images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.config.errors import ConfigError
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.inference.engines import StaticInferenceEngine
from megatron.core.inference.inference_request import InferenceRequest, VLMInferenceRequest
from megatron.core.inference.model_inference_wrappers.inference_wrapper_config import (
    InferenceWrapperConfig,
)
from megatron.core.inference.model_inference_wrappers.multimodal.vlm_inference_wrapper import (
    VLMInferenceWrapper,
)
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.inference.text_generation_controllers.vlm_text_generation_controller import (
    VLMTextGenerationController,
)
from megatron.core.models.huggingface.module import get_hf_model_type
from megatron.core.models.multimodal.llava_model import LLaVAModel
from megatron.core.parallel.process_groups_config import create_process_groups, make_grids
from tests.support.one_process import one_process_groups
from tests.support.ranks import run_ranks
from tests.support.scripts_for_megatron import Letters
from tests.unit.models.test_llava_model import IMAGE, llava

LENGTH = 48
PER_TILE = 4
COUNT = 6
GREEDY = SamplingParams(top_k=1, num_tokens_to_generate=COUNT)
PROMPT = [9, IMAGE, 11, 12, IMAGE, 13]
NUM_TILES = torch.tensor([1, 2])


class Words(Letters):
    eod = 100  # never generated


def images() -> Tensor:
    return torch.randn(3, 3, 12, 12, generator=torch.Generator().manual_seed(3))


def model_of(groups: Any, **stage: Any) -> LLaVAModel:
    sizes = {"pipeline_model_parallel_size": groups.pp.size(), "pipeline_dtype": torch.float64}
    return llava(groups, language=sizes, **stage).eval()


def controller_of(model: LLaVAModel) -> VLMTextGenerationController:
    config = InferenceWrapperConfig(
        hidden_size=32,
        inference_batch_times_seqlen_threshold=-1,
        fp32_residual_connection=False,
        params_dtype=torch.float64,
        padded_vocab_size=64,
        inference_max_requests=2,
        inference_max_seq_length=LENGTH,
    )
    context = StaticInferenceContext.from_config(config)
    return VLMTextGenerationController(VLMInferenceWrapper(model, config, context), Words())


def request(number: int = 0, **changes: Any) -> VLMInferenceRequest:
    given: dict[str, Any] = {
        "num_img_embeddings_per_tile": PER_TILE,
        "imgs": images(),
        "num_tiles": NUM_TILES,
        "decoder_seq_length": LENGTH,
        "prompt_tokens": list(PROMPT),
    }
    sampling = SamplingParams(top_k=1, num_tokens_to_generate=COUNT)
    return VLMInferenceRequest(
        request_id=number, prompt="", sampling_params=sampling, **given | changes
    )


def by_hand() -> list[int]:
    """Greedy tokens of forward passes without a cache."""
    model = model_of(one_process_groups())
    tokens = list(PROMPT)
    with torch.no_grad():
        for _ in range(COUNT):
            ids = torch.tensor([tokens])
            positions = torch.arange(len(tokens))[None]
            logits, _ = model(images(), ids, positions, num_image_tiles=NUM_TILES)
            tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(PROMPT) :]


def generated(rank: int, world: int, degrees: dict[str, int]) -> list[int]:
    groups = create_process_groups(*make_grids(world, **degrees))
    stage = {"pre_process": groups.is_first_stage, "post_process": groups.is_last_stage}
    engine = StaticInferenceEngine(controller_of(model_of(groups, **stage)))
    (answer,) = engine.generate(inference_requests=[request()])
    assert isinstance(answer.generated_tokens, Tensor)
    return answer.generated_tokens.tolist()


@pytest.mark.feature("Generation: scripts written for Megatron Core's VLM controller run")
@pytest.mark.parametrize("degrees", [{}, {"tp": 2}, {"pp": 2}], ids=["one", "tp2", "pp2"])
def test_images_of_a_request_take_the_places_of_their_tokens(degrees: dict[str, int]) -> None:
    for found in run_ranks(generated, 2 if degrees else 1, degrees):
        assert found == by_hand()


def test_requests_without_images_are_text() -> None:
    controller = controller_of(model_of(one_process_groups()))
    engine = StaticInferenceEngine(controller)
    text = InferenceRequest(request_id=1, prompt="abc", sampling_params=GREEDY)
    both = engine.generate(inference_requests=[request(), text])
    alone = engine.generate(prompts=["abc"], sampling_params=GREEDY)
    assert both[1].generated_text == alone[0].generated_text
    assert both[0].generated_length == COUNT


def test_forward_passes_of_a_script_give_the_same_tokens() -> None:
    controller = controller_of(model_of(one_process_groups()))
    wrapper = controller.inference_wrapped_model
    wrapper.prep_model_for_inference()
    tokens = torch.zeros(1, len(PROMPT) + COUNT, dtype=torch.int64)
    tokens[0, : len(PROMPT)] = torch.tensor(PROMPT)
    given = controller.prep_inference_input(tokens, {0: request()})  # type: ignore[arg-type]
    start = 0
    for end in range(len(PROMPT), tokens.shape[1]):
        window = wrapper.get_batch_for_context_window(given, start, end)
        logits = wrapper.run_one_forward_step(window)
        assert logits is not None
        tokens[0, end] = logits[0, -1].argmax()
        start = end
    assert tokens[0, len(PROMPT) :].tolist() == by_hand()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_tokens": [9, IMAGE, 11]}, "the prompt has 1 image tokens for 2 images"),
        ({"num_img_embeddings_per_tile": 5}, "3 tiles of 5 embeddings do not fit num_tiles"),
        ({"num_tiles": torch.tensor([1, 1])}, "3 tiles of 4 embeddings do not fit num_tiles"),
        ({"decoder_seq_length": 15}, "16 positions with its images, more than decoder_seq_length"),
    ],
)
def test_requests_that_contradict_themselves_are_refused(
    changes: dict[str, Any], message: str
) -> None:
    engine = StaticInferenceEngine(controller_of(model_of(one_process_groups())))
    with pytest.raises(ConfigError, match=message):
        engine.generate(inference_requests=[request(**changes)])


def test_the_architecture_of_a_folder_is_read_from_its_config(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    for name, kind in (("Qwen2ForCausalLM", "qwen"), ("SiglipVisionModel", "siglip")):
        config.write_text(json.dumps({"architectures": [name]}))
        assert get_hf_model_type(f"hf://{tmp_path}") == kind
    config.write_text(json.dumps({"architectures": ["BertModel"]}))
    with pytest.raises(NotImplementedError, match="architecture BertModel, which is none of qwen"):
        get_hf_model_type(str(tmp_path))
    with pytest.raises(ConfigError, match="no config.json"):
        get_hf_model_type("hf://Qwen/Qwen2-7B")


def test_a_model_that_needs_sizes_of_images_is_refused() -> None:
    """A VLMInferenceRequest has none; tiles in rows cannot be arranged without them."""
    model = llava(one_process_groups(), has_image_newline=True)
    wrapper = controller_of(model.eval()).inference_wrapped_model
    with pytest.raises(ConfigError, match="generate with megatron.inference.LLM"):
        wrapper.text_model()
