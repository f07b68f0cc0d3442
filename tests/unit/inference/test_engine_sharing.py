"""Forks, beams and drafts change pages and steps of a real model, but no token."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.core.inference.paged_engine.engine import EngineOptions
from megatron.core.inference.paged_engine.request import Beam, BeamParams, Request
from megatron.core.inference.sampling_params import SamplingParams
from tests.support.ranks import run_ranks
from tests.unit.inference.test_engine import Tokens, alone, assert_equal, engine, generated

PROMPT = [(7 * i) % 60 + 2 for i in range(10)]


def _samples(number: int, first: str | None) -> list[Request]:
    return [
        Request(
            str(i),
            [*PROMPT],
            SamplingParams(
                seed=i, num_tokens_to_generate=8, ignore_eos=True, return_log_probs=True
            ),
            fork_of=first if i else None,
        )
        for i in range(number)
    ]


def _tokens(options: EngineOptions, requests: list[Request]) -> Tokens:
    found = engine(options, 1, {}).generate(requests)
    return {k: [(t.token, t.log_prob) for t in tokens] for k, tokens in found.items()}


@pytest.mark.parametrize("max_requests", [1, 2, 4])
def test_forks_give_the_tokens_of_separate_requests(max_requests: int) -> None:
    options = EngineOptions(page_size=4, max_requests=max_requests, has_prefix_cache=False)
    found = _tokens(options, _samples(4, "0"))
    assert_equal(found, _tokens(replace(options, max_requests=1), _samples(4, None)))
    assert len({tuple(t for t, _ in tokens) for tokens in found.values()}) == 4


@pytest.mark.parametrize("num_draft_tokens", [1, 6])
def test_drafts_change_no_token(num_draft_tokens: int) -> None:
    assert_equal(generated(0, 1, {}, {}, {"num_draft_tokens": num_draft_tokens}), alone({}))


def test_drafts_change_no_token_on_pipeline_stages() -> None:
    options = {"num_draft_tokens": 4, "max_requests": 6}
    found = run_ranks(generated, 2, {"pp": 2}, {}, options)[0]
    assert_equal(found, alone({}))


def _beams(options: EngineOptions, beam: BeamParams) -> tuple[Beam, ...]:
    made = engine(options, 1, {})
    params = SamplingParams(num_tokens_to_generate=6, ignore_eos=True, seed=1)
    made.add(Request("a", [*PROMPT], params, beam=beam))
    outputs = []
    while made.has_unfinished:
        outputs += made.step()
    (output,) = outputs
    assert made.stats().num_free_pages == made.stats().num_pages
    return output.beams


def test_one_beam_is_the_greedy_text() -> None:
    options = EngineOptions(page_size=4, max_requests=2)
    params = SamplingParams(
        top_k=1, num_tokens_to_generate=6, ignore_eos=True, return_log_probs=True
    )
    greedy = _tokens(options, [Request("a", [*PROMPT], params)])["a"]
    (beam,) = _beams(options, BeamParams(1))
    assert_equal({"a": [(t.token, t.log_prob) for t in beam.tokens]}, {"a": greedy})


@pytest.mark.parametrize("max_requests", [1, 2, 6])
def test_beams_have_the_log_probs_of_their_texts(max_requests: int) -> None:
    found = _beams(EngineOptions(page_size=4, max_requests=max_requests), BeamParams(4))
    assert len({tuple(t.token for t in b.tokens) for b in found}) == 4
    assert [b.score for b in found] == sorted((b.score for b in found), reverse=True)
    for beam in found:
        text = PROMPT + [t.token for t in beam.tokens]
        params = SamplingParams(prompt_log_probs_only=True, seed=1)
        made = engine(EngineOptions(page_size=4, max_requests=1), 1, {})
        made.add(Request("a", text, params))
        (output,) = made.step()
        scores = [t.log_prob for t in output.prompt_scores[-6:]]
        assert [t.log_prob for t in beam.tokens] == pytest.approx(scores, abs=1e-5)
        assert beam.score == pytest.approx(sum(scores) / 6, abs=1e-5)
