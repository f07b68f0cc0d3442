"""Generation splits any number of layers over any number of pipeline stages."""

from __future__ import annotations

import pytest

from megatron.inference.generation import GenerationLayout
from tests.support import selection
from tests.support.generation_ranks import generate
from tests.support.ranks import run_ranks
from tests.support.runs import run_gpt

PROMPTS = [[(5 * i + 3 * j) % 90 + 1 for j in range(2 + 5 * i)] for i in range(5)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint of 3 layers, as one process saves it."""
    folder = tmp_path_factory.mktemp("run")
    flags = ["--num-layers", "3", "--train-iters", "2", "--save-interval", "2"]
    run_gpt(folder / "logs", *flags, "--save", str(folder / "saved"))
    return str(folder / "saved")


def answers(saved: str, world_size: int, pipeline: int) -> list[tuple[list[int], list[float]]]:
    layout = GenerationLayout(pipeline=pipeline)
    found, *_ = run_ranks(generate, world_size, saved, PROMPTS, 8, layout, {})
    return found


@pytest.mark.feature(
    "Generation: layers are split unevenly over pipeline stages where they must be"
)
@pytest.mark.parametrize(
    ("world_size", "pipeline"), selection.only([(4, 2), (5, 5)], [(2, 2), (4, 2), (4, 4), (5, 5)])
)
def test_three_layers_give_the_tokens_of_one_process(
    saved: str, world_size: int, pipeline: int
) -> None:
    wanted = answers(saved, 1, 1)
    found = answers(saved, world_size, pipeline)
    for (tokens, log_probs), (others, more) in zip(found, wanted, strict=True):
        assert tokens == others
        assert log_probs == pytest.approx(more, abs=1e-5)
