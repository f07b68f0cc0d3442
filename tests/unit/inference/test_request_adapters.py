"""Adapters by request: each text is that of the model into which its adapter is merged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from megatron.core.config.errors import CheckpointError, ConfigError
from megatron.core.inference.paged_engine.engine import Engine, EngineOptions
from megatron.core.inference.paged_engine.pages import PagePool
from megatron.core.inference.paged_engine.request import Request, RequestError
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.params.param_info import info_of
from megatron.core.peft.lora import LoraConfig, make_adapters
from tests.support.ranks import run_ranks
from tests.unit.inference.test_engine import engine

ADAPTERS = {"a": 1, "b": 2}
LAYERS = {  # of each adapter; some layers have one of them only
    "a": ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"),
    "b": ("q_proj", "v_proj", "linear_fc2", "word_embeddings", "output_layer"),
}
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "tp2": (2, {"tp": 2}),
    "tp2 pp2": (4, {"tp": 2, "pp": 2}),
    "2 replicas": (2, {}),
}
Texts = dict[str, list[int]]


@torch.no_grad()
def adapter_of(module: nn.Module, name: str) -> dict[Any, Any]:
    """This rank's part of an adapter whose values depend on its name and theirs."""
    if name == "broken":
        raise CheckpointError("broken holds no adapter")
    config = LoraConfig(rank=3, alpha=6.0, targets=LAYERS[name], use_dora=name == "a")
    found = {}
    for _, layer, adapter in make_adapters(module, config):
        found[layer] = adapter.eval()
        for param in adapter.parameters():
            info = info_of(param)
            seed = sum(map(ord, info.name)) * 10 + ADAPTERS[name]
            generator = torch.Generator().manual_seed(seed)
            whole = torch.randn(info.global_shape, generator=generator, dtype=torch.float64)
            for at, view in info.pieces(param.data):
                box = tuple(slice(i, i + n) for i, n in zip(at, view.shape, strict=True))
                view.copy_(0.3 * whole[box])
    return found


def opened(options: EngineOptions, world: int, sizes: dict[str, int], **changes: Any) -> Engine:
    made = engine(options, world, sizes, **changes)
    made.model = replace(made.model, load_adapter=partial(adapter_of, made.model.module))
    return made


def requests(adapters: tuple[str | None, ...] = (None, "a", "b")) -> Iterator[Request]:
    """Equal prompts, with a complete page, for each adapter."""
    params = SamplingParams(temperature=0.0, num_tokens_to_generate=6, ignore_eos=True)
    for i in range(3):
        for adapter in adapters:
            prompt = [(5 * i + 3 * j) % 60 + 2 for j in range(6 + 7 * i)]
            yield Request(f"{adapter} {i}", prompt, params, adapter=adapter)


def texts_of(made: Engine, wanted: Iterator[Request]) -> Texts:
    return {key: [t.token for t in out] for key, out in made.generate(wanted).items()}


def merged_texts() -> Texts:
    """The texts of three models, with their adapters added to the weights."""
    found = {}
    for adapter in (None, "a", "b"):
        made = opened(EngineOptions(page_size=4), 1, {})
        with torch.no_grad():
            terms = adapter_of(made.model.module, adapter) if adapter else {}
            for layer, term in terms.items():
                layer.weight += term.delta()
        wanted = (replace(r, adapter=None) for r in requests((adapter,)))
        found |= texts_of(made, wanted)
    return found


def generated(rank: int, world: int, sizes: dict[str, int], more: dict[str, Any]) -> Texts:
    made = opened(EngineOptions(page_size=4, **more), world, sizes)
    if rank:
        made.follow()
        return {}
    for name in ADAPTERS:
        made.load_adapter(name, name)
    with pytest.raises(CheckpointError, match="broken"):
        made.load_adapter("c", "broken")
    found = texts_of(made, requests())
    assert found == texts_of(made, requests())  # with pages of the prefix cache
    made.unload_adapter("b")
    with pytest.raises(RequestError, match="the adapter 'b' is not loaded"):
        made.add(next(requests(("b",))))
    assert texts_of(made, requests((None, "a"))).items() < found.items()
    made.close()
    return found


@pytest.mark.feature("Serving: adapters by request write the text of their merged models")
@pytest.mark.parametrize(
    "more", [{}, {"max_step_tokens": 5}, {"num_draft_tokens": 3}], ids=["", "parts", "drafts"]
)
def test_each_request_has_its_adapter_in_one_batch(more: dict[str, Any]) -> None:
    found = generated(0, 1, {}, more)
    assert found == merged_texts()
    assert len({str(found[f"{adapter} 2"]) for adapter in (None, "a", "b")}) == 3


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_layouts_give_the_same_texts(layout: str) -> None:
    world, sizes = LAYOUTS[layout]
    assert run_ranks(generated, world, sizes, {})[0] == merged_texts()


def test_a_name_gets_other_weights_while_a_request_goes_on_with_the_old() -> None:
    made = opened(EngineOptions(page_size=4), 1, {})
    made.load_adapter("x", "a")
    expected = texts_of(made, requests(("x",)))
    (first, *_) = requests(("x",))
    made.add(first)
    made.step()
    made.load_adapter("x", "b")
    while made.has_unfinished:
        made.step()
    assert first.output == expected["x 0"]
    found = texts_of(made, requests(("x",)))  # no page of the old adapter
    made.load_adapter("b", "b")
    assert list(found.values()) == list(texts_of(made, requests(("b",))).values())
    assert found != expected


def test_adapters_do_not_share_pages() -> None:
    pool = PagePool(4, 4)
    roots = [pool.root([], adapter=number, is_long=x) for number in range(3) for x in (False, True)]
    assert len({*roots, pool.root([3])}) == 7


@pytest.mark.parametrize("more", [{"batch_invariant": True}])
def test_an_engine_that_cannot_have_adapters_says_so(more: dict[str, Any]) -> None:
    made = opened(EngineOptions(**more), 1, {})
    with pytest.raises(ConfigError, match="merge the adapter into its model"):
        made.load_adapter("a", "a")
