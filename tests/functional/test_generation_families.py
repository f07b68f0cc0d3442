"""Greedy tokens and log-probs of every converted family equal those of `transformers`."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.core.inference.sampling_params import SamplingParams
from megatron.training.inference.generation import open_writer
from tests.ranks import run_ranks

families = pytest.importorskip("tests.functional.generation_families", reason="needs transformers")


@pytest.fixture(scope="module", params=families.FAMILIES)
def reference(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> families.Reference:
    folder: Path = tmp_path_factory.mktemp("family")
    return families.Reference.generate(request.param, folder)


def generate(
    rank: int, world_size: int, load: str, prompts: list[list[int]], flags: dict[str, object]
) -> list[tuple[list[int], list[float]]]:
    """Return the tokens and log-probs that follow each prompt."""
    writer = open_writer(load, device_kind="cpu", flags=flags)
    params = SamplingParams(
        num_tokens_to_generate=families.NUM_TOKENS, top_k=1, ignore_eos=True, return_log_probs=True
    )
    if rank:
        writer.engine.follow()
        return []
    answers = writer.engine.generate(
        writer.request(str(i), prompt, params) for i, prompt in enumerate(prompts)
    ).values()
    writer.engine.close()
    return [([t.token for t in text], [t.log_prob for t in text]) for text in answers]


@pytest.mark.feature("Inference: 14 families give the tokens and log-probs of transformers")
def test_greedy_tokens_equal_those_of_transformers(reference: families.Reference) -> None:
    load, flags = str(reference.folder), dict(reference.family.flags)
    (found,) = run_ranks(generate, 1, load, reference.prompts, flags)
    reference.assert_equal(found)
