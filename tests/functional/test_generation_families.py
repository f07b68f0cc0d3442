"""Greedy tokens and log-probs of every converted family equal those of `transformers`."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.inference.generation import GenerationLayout
from tests.support import selection
from tests.support.generation_ranks import generate
from tests.support.ranks import run_ranks

families = pytest.importorskip("tests.support.generation_families", reason="needs transformers")


@pytest.fixture(scope="module")
def reference(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> families.Reference:
    folder: Path = tmp_path_factory.mktemp("family")
    return families.Reference.generate(request.param, folder)


LAYOUTS = {
    "1 rank": (1, GenerationLayout()),
    "tp2": (2, GenerationLayout(tensor=2)),
    "pp2": (2, GenerationLayout(pipeline=2)),
    "tp2 pp2": (4, GenerationLayout(pipeline=2)),
    "ep2": (2, GenerationLayout(tensor=1, expert=2)),
    "2 replicas": (2, GenerationLayout(tensor=1)),
}

REPLICATED = ("llama3", "mixtral", "nemotron-h", "t5")  # one of each kind of layers


def _exists(family: str, layout: str) -> bool:
    """Return whether the layout can be used and shows something that no other family shows."""
    if layout == "2 replicas":  # replicas share requests in the same way for all families
        return family in REPLICATED
    return LAYOUTS[layout][1].expert == 1 or families.FAMILIES[family].has_experts


PAIRS = [(of, name) for of in families.FAMILIES for name in LAYOUTS if _exists(of, name)]
# By default each kind of layers runs in one layout, and each layout with a few kinds.
DEFAULT = [
    ("llama3", "tp2"),
    ("qwen3", "tp2 pp2"),
    ("gemma3", "1 rank"),
    ("olmo2", "pp2"),
    ("qwen3-moe", "ep2"),
    ("qwen3-next", "tp2"),
    ("deepseek-v3, latent cache", "tp2"),
    ("ministral3", "tp2"),
    ("mistral4, latent cache", "1 rank"),
    ("gpt-oss", "pp2"),
    ("nemotron-h", "2 replicas"),
    ("t5", "1 rank"),
]


@pytest.mark.feature(
    "Inference: 28 families give the tokens and log-probs of transformers in every layout"
)
@pytest.mark.parametrize(
    ("reference", "name"), selection.only(DEFAULT, PAIRS), indirect=["reference"]
)
def test_greedy_tokens_equal_those_of_transformers(
    reference: families.Reference, name: str
) -> None:
    world_size, layout = LAYOUTS[name]
    found, *_ = run_ranks(
        generate,
        world_size,
        str(reference.folder),
        reference.prompts,
        families.NUM_TOKENS,
        layout,
        dict(reference.family.flags),
    )
    reference.assert_equal(found)


def test_t5_generates_where_both_halves_have_several_stages(tmp_path: Path) -> None:
    reference = families.Reference.generate("t5", tmp_path)
    words = (str(reference.folder), reference.prompts, families.NUM_TOKENS)
    layout = GenerationLayout(tensor=1, pipeline=4)
    found, *_ = run_ranks(generate, 4, *words, layout, dict(reference.family.flags))
    reference.assert_equal(found)
