"""Beam search finds the texts that a search over complete sequences finds."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import numpy as np
import pytest

from megatron.core.inference.paged_engine.request import BeamParams, Request, RequestError
from megatron.core.inference.paged_engine.request_state import BeamSearch, RequestState
from megatron.core.inference.paged_engine.scheduler import EngineLimits
from tests.support.engine_lanes import LIMITS, Lanes, make_request, random_request
from tests.support.engine_simulation import (
    EOD,
    VOCABULARY,
    entry_of,
    log_probs_of,
    run_alone,
)


@dataclass
class Text:
    """A text with all its numbers, as a search without pages knows it."""

    tokens: list[int]
    total: float
    entries: np.ndarray

    def next_log_probs(self, source: list[int]) -> np.ndarray:
        for token in self.tokens[len(self.entries) :]:
            self.entries = np.append(self.entries, entry_of(self.entries, token, source))
        return log_probs_of(self.entries)


def _search(request: Request, limit: int) -> list[tuple[float, list[int]]]:
    """Return (score, tokens) of ended texts, best first: each step looks at all tokens."""
    beam = request.beam
    assert beam is not None
    start = len(request.prompt)
    texts = [Text(request.prompt, 0.0, np.empty(0, dtype=np.int64))]
    ended: list[tuple[float, list[int]]] = []

    def end(text: list[int], total: float) -> None:
        score = total / (len(text) - start) ** beam.length_penalty
        ended.append((score, text[start:]))
        ended.sort(key=lambda e: -e[0])
        del ended[beam.width :]

    for length in range(1, limit + 1):
        options = []
        for text in texts:
            values = text.next_log_probs(request.source)
            options += [(text.total + float(values[t]), text, t) for t in range(VOCABULARY)]
        options.sort(key=lambda o: -o[0])
        texts = []
        for rank, (total, text, token) in enumerate(options[: 2 * beam.width]):
            if token == EOD and not request.params.ignore_eos:
                if rank < beam.width and length > request.params.min_tokens:
                    end([*text.tokens, token], total)
            elif len(texts) < beam.width:
                texts.append(Text([*text.tokens, token], total, text.entries))
            if len(texts) == beam.width:
                break
        is_full = len(ended) == beam.width
        best = options[0][0] / length**beam.length_penalty
        if is_full and ended[-1][0] >= best:
            return ended
    for text in texts:
        end(text.tokens, text.total)
    return ended


def _beam_request(name: str, length: int, beam: BeamParams, **params: object) -> Request:
    values = {"ignore_eos": False, "num_tokens_to_generate": 9, **params}
    return replace(make_request(name, length, **values), beam=beam)


def _check(lanes: Lanes, request: Request, longest: int = 60) -> None:
    limit = min(request.params.num_tokens_to_generate, longest - len(request.prompt))
    (output,) = lanes.outputs.pop(request.request_id)
    del lanes.requests[request.request_id]
    assert [(b.score, [t.token for t in b.tokens]) for b in output.beams] == _search(request, limit)
    best = output.beams[0]
    assert (output.new, output.finish_reason) == (best.tokens, best.finish_reason)
    assert request.output == [t.token for t in output.new]
    expected = replace(request.params, prompt_log_probs_only=True)
    if request.params.return_prompt_log_probs:
        alone = run_alone(replace(request, params=expected), longest)
        assert list(output.prompt_scores) == alone.scores


@pytest.mark.parametrize("width", [1, 2, 3, 5])
@pytest.mark.parametrize("length_penalty", [0.0, 0.7, 1.0, 2.0])
def test_beams_equal_those_of_a_search_over_complete_texts(
    width: int, length_penalty: float
) -> None:
    beam = BeamParams(width, length_penalty)
    reasons = set()
    for length in (1, 4, 7, 13):
        lanes = Lanes()
        request = lanes.add(_beam_request("a", length, beam, min_tokens=length % 3))
        while lanes.schedulers[0].has_unfinished:
            lanes.step()
        assert lanes.pool.num_free == lanes.pool.num_pages
        assert lanes.outputs["a"][0].num_cached_prompt_tokens == 0
        reasons |= {b.finish_reason for b in lanes.outputs["a"][0].beams}
        _check(lanes, request)
    assert "stop" in reasons


@pytest.mark.parametrize("num_pages", [15, 30, 200])
@pytest.mark.parametrize("slots", [1, 2, 6])
@pytest.mark.parametrize("is_shared", [True, False])
def test_beams_among_other_requests_with_few_pages_and_slots(
    num_pages: int, slots: int, is_shared: bool
) -> None:
    for seed in range(3):
        limits = replace(LIMITS, num_pages=num_pages, max_requests=2 * slots, max_step_tokens=20)
        limits = replace(limits, has_prefix_cache=is_shared, has_recurrent_layers=not is_shared)
        _random_searches(limits, random.Random(f"{num_pages} {slots} {seed}"))


def _random_searches(limits: EngineLimits, rng: random.Random) -> None:
    lanes = Lanes(limits, 2)
    searches = []
    depths = iter(lambda: rng.choice([0, 0, 1]), -1)
    for i in range(12):
        request = random_request(f"r{i}", rng)
        if i % 3 == 0:
            beam = BeamParams(rng.randrange(1, 5))
            scored = rng.random() < 0.5
            request = _beam_request(
                f"r{i}", rng.randrange(1, 20), beam, return_prompt_log_probs=scored
            )
            searches.append(request)
        lanes.add(request, rng.randrange(2))
        for _ in range(rng.randrange(6)):
            lanes.step(rng.randrange(2), next(depths))
        if rng.random() < 0.2:
            lanes.abort(f"r{i}")
    while any(s.has_unfinished for s in lanes.schedulers):
        for lane in range(2):
            lanes.step(lane, next(depths))
    for request in searches:
        if request.request_id in lanes.aborted:
            assert lanes.outputs.pop(request.request_id) == []
            del lanes.requests[request.request_id]
        else:
            _check(lanes, request)
    lanes.check()


def test_beams_share_full_pages_and_copy_the_last_one() -> None:
    lanes = Lanes()
    lanes.add(_beam_request("a", 9, BeamParams(3), ignore_eos=True))
    lanes.step()
    plan = lanes.step()
    assert plan is not None
    pages = [s.pages.tolist() for s in plan.segments]
    assert [s.start for s in plan.segments] == [9, 9, 9]
    assert [p[:2] for p in pages] == [pages[0][:2]] * 3
    assert plan.copies == [(pages[0][2], pages[1][2]), (pages[0][2], pages[2][2])]
    assert all(a.params["top_n_logprobs"] == 6 for a in plan.admissions)
    lanes.schedulers[0].abort("a")
    lanes.finish()
    assert lanes.pool.num_free == lanes.pool.num_pages


def test_an_ended_text_outside_the_best_ones_is_not_kept() -> None:
    request = _beam_request("a", 2, BeamParams(2))
    search = BeamSearch(BeamParams(2), RequestState(request, (0, 0), 5, 1, EOD), 0)
    top = [(3, -1.0), (4, -2.0), (EOD, -3.0), (5, -4.0)]
    assert search.advance([top]) == [(0, 3), (0, 4)]
    assert search.ended == []
    top = [(EOD, -0.5), (3, -1.0), (4, -2.0), (5, -4.0)]
    assert search.advance([top, top]) == [(0, 3), (0, 4)]
    assert [(b.score, b.finish_reason) for b in search.ended] == [(-0.75, "stop")]


@pytest.mark.parametrize(
    ("beam", "params", "message"),
    [
        (BeamParams(0), {}, "beam width 0: give 1 or more"),
        *(
            (BeamParams(2, penalty), {}, f"length_penalty {penalty:g}: give a number from -10 to")
            for penalty in (1e4, -1e4, float("nan"))
        ),
        (BeamParams(2), {"logit_bias": {1: 2.0}}, "logit_bias has no effect on beam search"),
        (
            BeamParams(2),
            {"repetition_penalty": 1.2},
            "repetition_penalty 1.2 has no effect on beam search: leave it out",
        ),
    ],
)
def test_what_beam_search_lacks_is_refused(
    beam: BeamParams, params: dict[str, object], message: str
) -> None:
    lanes = Lanes()
    with pytest.raises(RequestError, match=message):
        lanes.add(_beam_request("a", 4, beam, **params))
