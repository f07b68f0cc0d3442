"""Adapters by request and vectors of texts, judged by peft and transformers."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.core.inference.paged_engine.options import EngineOptions
from megatron.core.inference.sampling_params import SamplingParams
from megatron.inference import LLM, LoRARequest
from megatron.inference.generation import GenerationLayout
from megatron.training.conversion.convert import ConversionRequest, convert
from tests.support.ranks import run_ranks

models = pytest.importorskip("tests.support.hugging_face_models", reason="needs transformers")
peft = models.peft
needs_peft = pytest.mark.skipif(peft is None, reason="needs peft")

PROMPTS = models.prompts(20)[:, :9].tolist()
NUM_TOKENS = 8
TARGETS = {"one": ["q_proj", "v_proj", "down_proj"], "two": "all-linear"}
LAYOUTS = {"tp2": GenerationLayout(), "pp2": GenerationLayout(tensor=1, pipeline=2)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of two layers, two adapters as peft saves them, and the first in our form."""
    root = tmp_path_factory.mktemp("judges")
    models.write(root / "base", "llama", num_hidden_layers=2)
    for seed, (name, targets) in enumerate(TARGETS.items()):
        model = models.CLASSES["Llama"][1].from_pretrained(root / "base")
        torch.manual_seed(seed)
        config = peft.LoraConfig(
            r=4 + seed, lora_alpha=16, target_modules=targets, init_lora_weights=False
        )
        peft.get_peft_model(model, config).save_pretrained(root / name)
    model = models.CLASSES["Llama"][1].from_pretrained(root / "base")
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(param.flip(0))
    model.save_pretrained(root / "other")
    convert(
        ConversionRequest(
            source=root / "one",
            target=root / "ours",
            format="safetensors_dist",
            base=root / "base",
        )
    )
    return root


@torch.no_grad()
def their_texts(folder: Path, name: str | None) -> list[list[int]]:
    base = folder / ("other" if name == "other" else "base")
    model = models.CLASSES["Llama"][1].from_pretrained(base)
    if name in TARGETS:
        model = peft.PeftModel.from_pretrained(model, folder / name)
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": NUM_TOKENS}
    options["min_new_tokens"] = NUM_TOKENS
    ids = torch.tensor(PROMPTS)
    mask = torch.ones_like(ids)
    found = model.generate(input_ids=ids, attention_mask=mask, pad_token_id=0, **options)
    return found[:, ids.shape[1] :].tolist()


@torch.no_grad()
def their_vectors(folder: Path, name: str | None) -> torch.Tensor:
    """Return the last hidden states after the final norm: [prompts, tokens, h]."""
    model = models.CLASSES["Llama"][1].from_pretrained(folder / "base")
    if name is not None:
        model = peft.PeftModel.from_pretrained(model, folder / name).base_model.model
    return model.model(torch.tensor(PROMPTS)).last_hidden_state


Found = tuple[dict[Any, list[list[int]]], dict[Any, torch.Tensor]]


def ours(rank: int, world: int, folder: Path, layout: GenerationLayout) -> Found:
    """Return the texts of each adapter and of new weights, and vectors.

    These by adapter, pooling and whether their length is 1.
    """
    # Prompts are computed in parts.
    options = EngineOptions(max_step_tokens=13)
    llm = LLM.load(str(folder / "base"), device_kind="cpu", layout=layout, options=options)
    names = [None, "one", "two", "ours"]
    adapters = {n: LoRARequest(n, 1, str(folder / n)) for n in names if n is not None}
    every = [(name, prompt) for prompt in PROMPTS for name in names]
    params = SamplingParams(temperature=0.0, num_tokens_to_generate=NUM_TOKENS, ignore_eos=True)
    answers = llm.generate(
        [prompt for _, prompt in every],
        params,
        lora_request=[adapters.get(name) for name, _ in every],
    )
    texts: dict[Any, list[list[int]]] = {name: [] for name in names}
    for (name, _), answer in zip(every, answers, strict=False):
        texts[name].append([token.token for token in answer.tokens])
    vectors = {}
    for key in product((None, "two"), ("last", "mean"), (True, False)):
        name, pooling, is_normal = key
        # The prefix cache has pages of these prompts by now.
        found = llm.embed(
            PROMPTS, pooling=pooling, normalize=is_normal, lora_request=adapters.get(name)
        )
        vectors[key] = torch.tensor(np.array(found))
    with llm._leading() as leads:
        if leads:
            assert llm.engine.update_weights(str(folder / "other")) == 1
    answers = llm.generate(PROMPTS, params)
    texts["other"] = [[token.token for token in answer.tokens] for answer in answers]
    return texts, vectors


@needs_peft
@pytest.mark.feature("Serving: adapters by request write what peft and transformers write")
@pytest.mark.parametrize("layout", ["tp2", pytest.param("pp2", marks=pytest.mark.slow)])
@pytest.mark.feature("Serving: vectors of texts are those of transformers' hidden states")
def test_texts_and_vectors_are_those_of_peft(folder: Path, layout: str) -> None:
    found, vectors = run_ranks(ours, 2, folder, LAYOUTS[layout])[0]
    expected = {name: their_texts(folder, name) for name in (None, "one", "two", "other")}
    assert found == {**expected, "ours": expected["one"]}
    assert len({str(texts) for texts in expected.values()}) == 4
    for (name, pooling, is_normal), vector in vectors.items():
        states = their_vectors(folder, name)
        pooled = states[:, -1] if pooling == "last" else states.mean(1)
        pooled = torch.nn.functional.normalize(pooled) if is_normal else pooled
        torch.testing.assert_close(vector, pooled, rtol=1e-5, atol=1e-5 * float(pooled.abs().max()))
