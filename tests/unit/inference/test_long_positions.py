"""LongRoPE: a text that outgrows the short frequencies gets the long ones for all its tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.core.inference.paged_engine.engine import Engine
from megatron.core.inference.paged_engine.options import EngineOptions
from megatron.core.inference.paged_engine.pages import PagePool
from megatron.core.inference.paged_engine.request import BeamParams, Request
from megatron.core.inference.paged_engine.request_state import (
    RequestState,
    Speculation,
)
from megatron.core.inference.sampling_params import SamplingParams
from tests.support import selection
from tests.support.ranks import run_ranks
from tests.unit.inference.test_engine import LENGTH, engine

BORDER = 20
LONG: dict[str, Any] = {
    "longrope_short_factor": (1.0, 1.1, 1.2, 1.3),
    "longrope_long_factor": (2.0, 2.5, 3.0, 3.5),
    "longrope_original_max_position_embeddings": BORDER,
}
PROMPTS = (3, BORDER - 4, BORDER - 1, BORDER, BORDER + 1, 30)  # lengths; each begins the next one


def requests() -> list[Request]:
    out = []
    for length in PROMPTS:
        for fork in range(2):
            params = SamplingParams(
                temperature=1.0 if fork else 0.0,
                seed=fork,
                num_tokens_to_generate=min(25, LENGTH - length),
                ignore_eos=True,
                return_log_probs=True,
                return_prompt_log_probs=not fork,
            )
            name = f"{length} {fork}"
            prompt = [(5 * j) % 12 + 2 for j in range(length)]  # repeats itself, as drafts need
            out.append(Request(name, prompt, params, fork_of=f"{length} 0" if fork else None))
    return out


def check(made: Engine) -> None:
    """Compare all log-probs with passes over complete texts, as a model in training runs them."""
    texts: dict[str, list[int]] = {}
    found: dict[str, list[float]] = {}
    for request in requests():
        made.add(request)
        texts[request.request_id] = [*request.prompt]
        found[request.request_id] = []
    while made.has_unfinished:
        for output in made.step():
            texts[output.request_id] += [t.token for t in output.new]
            scores = [t.log_prob for t in (*output.prompt_scores, *output.new)]
            found[output.request_id] += scores
    stats = made.stats()
    assert stats.num_free_pages == stats.num_pages
    for request in requests():
        text = texts[request.request_id]
        scores = found[request.request_id]
        wanted = log_probs(made, text, len(request.prompt))[-len(scores) :]
        assert scores == pytest.approx(wanted, abs=1e-5), request.request_id


_SCORES: dict[tuple[tuple[int, ...], int], list[float]] = {}  # the model is always the same


def log_probs(made: Engine, text: list[int], num_prompt: int) -> list[float]:
    """Log-probs of tokens 1, 2, ..: of the prompt by one pass, of each later token by its own."""
    key = (tuple(text), num_prompt)
    if key not in _SCORES:
        _SCORES[key] = _log_probs(made, text, num_prompt)
    return _SCORES[key]


def _log_probs(made: Engine, text: list[int], num_prompt: int) -> list[float]:
    out = []
    for stop in range(num_prompt, len(text)):
        ids = torch.tensor([text[:stop]])
        with torch.no_grad():
            logits = made.model.module(ids, torch.arange(stop)[None], None)[0]
        rows = logits.log_softmax(-1)
        if stop == num_prompt:
            out += [float(rows[i, text[i + 1]]) for i in range(stop - 1)]
        out.append(float(rows[-1, text[stop]]))
    return out


@pytest.mark.feature("Generation: LongRoPE (Phi-3) beyond the original length, as in transformers")
@pytest.mark.parametrize(
    "options",
    selection.first(
        3,
        [
            {"num_draft_tokens": 4},
            {"has_prefix_cache": False},
            {"buffer_bytes": 30 * 4 * 4 * 2 * 32 * 8, "max_requests": 6},  # 30 pages: pre-emption
            {},
            {"max_step_tokens": 7, "max_requests": 3},
        ],
    ),
)
def test_log_probs_are_those_of_complete_texts(options: dict[str, Any]) -> None:
    made = engine(EngineOptions(page_size=4, **options), 1, {}, **LONG)
    check(made)
    check(made)  # now with pages that earlier texts have left
    if "num_draft_tokens" in options:
        assert made.stats().num_accepted_drafts > 0


def test_drafts_end_where_the_frequencies_change() -> None:
    pool = PagePool(8, 4, longest_short=BORDER)
    for length, expected in ((BORDER - 10, 8), (BORDER - 2, 2), (BORDER, 0), (BORDER + 1, 8)):
        request = Request("a", [3, 7] * LENGTH, SamplingParams(num_tokens_to_generate=30))
        request.prompt = request.prompt[:length]
        state = RequestState(request, (0, 0), 30, 1, None)
        state.speculation = Speculation(8, request.prompt)
        state.choose_frequencies(pool)
        assert len(state.draft(8, pool)) == expected, length


def tokens(rank: int, world: int, sizes: dict[str, int]) -> dict[str, list[int]]:
    made = engine(EngineOptions(page_size=4), world, sizes, **LONG)
    if rank:
        made.follow()
        return {}
    found = made.generate(requests())
    made.close()
    return {name: [t.token for t in new] for name, new in found.items()}


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"pp": 2}])
def test_ranks_give_the_tokens_of_one_process(sizes: dict[str, int]) -> None:
    assert run_ranks(tokens, 2, sizes)[0] == tokens(0, 1, {})


def test_beams_cross_together() -> None:
    def beams(prompt: list[int], count: int) -> list[tuple[list[int], float]]:
        made = engine(EngineOptions(page_size=4), 1, {}, **LONG)
        params = SamplingParams(num_tokens_to_generate=count, ignore_eos=True)
        made.add(Request("a", prompt, params, beam=BeamParams(width=3)))
        outputs = []
        while made.has_unfinished:
            outputs += made.step()
        stats = made.stats()
        assert stats.num_free_pages == stats.num_pages
        return [
            ([t.token for t in b.tokens], sum(t.log_prob for t in b.tokens))
            for b in outputs[-1].beams
        ]

    prompt = [(5 * j) % 12 + 2 for j in range(BORDER - 3)]
    made = engine(EngineOptions(page_size=4), 1, {}, **LONG)
    for text, total in beams(prompt, 12):
        wanted = sum(log_probs(made, [*prompt, *text], len(prompt))[-len(text) :])
        assert total == pytest.approx(wanted, abs=1e-5)
