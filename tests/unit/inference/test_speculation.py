"""Drafts save steps and change no token."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from megatron.core.inference.paged_engine.request import RequestError
from megatron.core.inference.paged_engine.request_state import NgramLookup, Speculation
from megatron.core.inference.paged_engine.step_plan import NO_TOKEN, SAMPLE, StepOutput
from tests.support.engine_lanes import LIMITS, Lanes, make_request, random_work
from tests.support.engine_simulation import EOD, CountingMatcher


def test_a_draft_is_what_followed_the_same_tokens_last() -> None:
    drafter = NgramLookup([])
    assert drafter.draft(3) == []
    drafter.extend([1, 2, 3, 4, 9, 2, 3, 5, 6, 7])
    assert drafter.draft(3) == []
    drafter.extend([2, 3])
    assert drafter.draft(2) == [5, 6]
    drafter.extend([4])
    assert drafter.draft(4) == [9, 2, 3, 5]  # three tokens were seen before


def test_a_text_that_repeats_itself_is_continued() -> None:
    drafter = NgramLookup([7, 8, 9, 7, 8, 9])
    assert drafter.draft(7) == [7, 8, 9, 7, 8, 9, 7]


def test_the_number_of_drafts_follows_their_success() -> None:
    speculation = Speculation(8, [4] * 9)
    lengths = []
    for num_accepted in (3, 0, 1, 2, 4, 8):
        drafts = speculation.draft(100)
        lengths.append(len(drafts))
        speculation.record(len(drafts), [4] * (1 + num_accepted))
    assert lengths == [8, 4, 1, 2, 4, 8]
    assert len(speculation.draft(3)) == 3


@pytest.mark.parametrize("num_drafts", [1, 3, 8])
@pytest.mark.parametrize("num_pages", [15, 200])
def test_drafts_are_accepted_and_rejected(num_drafts: int, num_pages: int) -> None:
    rng = random.Random(num_drafts)
    limits = replace(LIMITS, num_draft_tokens=num_drafts, num_pages=num_pages, max_step_tokens=30)
    lanes = Lanes(limits, 2)
    random_work(lanes, rng, 60)
    drafted = sum(s.num_drafts for s in lanes.schedulers)
    accepted = sum(s.num_accepted_drafts for s in lanes.schedulers)
    assert 0 < accepted < drafted


def test_a_segment_with_drafts_samples_after_each_of_them() -> None:
    lanes = Lanes(replace(LIMITS, num_draft_tokens=4))
    request = make_request("a", 1)
    request.prompt = [1, 5, 6, 1, 5]
    lanes.add(request)
    lanes.step()
    plan = lanes.step()
    while plan is not None and len(plan.segments[0].tokens) == 1:
        plan = lanes.step()
    assert plan is not None
    (segment,) = plan.segments
    assert segment.tokens[0] == request.output[-1]
    assert segment.targets.tolist() == [SAMPLE] * len(segment.tokens)
    lanes.run()


def test_drafts_do_not_take_the_rows_of_other_requests() -> None:
    lanes = Lanes(replace(LIMITS, num_draft_tokens=8, max_step_tokens=12))
    for i in range(2):
        request = make_request(f"r{i}", 1, num_tokens_to_generate=30)
        request.prompt = [3, 10, 9, 6, 8] * 2
        lanes.add(request)
    for _ in range(3):
        lanes.step()
    lanes.add(make_request("long", 40))
    found = []
    for _ in range(3):
        plan = lanes.step()
        assert plan is not None
        found.append([len(s.tokens) for s in plan.segments])
    assert [rows[:2] for rows in found[1:]] == [[1, 1], [1, 1]]
    assert found[1][2] == 10
    lanes.run()


def test_drafts_end_where_the_text_ends() -> None:
    lanes = Lanes(replace(LIMITS, num_draft_tokens=8, max_sequence_length=20))
    request = make_request("a", 1, num_tokens_to_generate=40)
    request.prompt = [3, 10, 9, 6, 8] * 2
    lanes.add(request)
    plan = lanes.step()
    while plan is not None:
        assert plan.segments[0].num_keys <= 19
        plan = lanes.step()
    lanes.check()
    assert len(request.output) == 10


def test_no_pages_are_taken_from_requests_for_drafts() -> None:
    lanes = Lanes(replace(LIMITS, num_draft_tokens=8, num_pages=5, max_step_tokens=100))
    for i in range(2):
        request = make_request(f"r{i}", 1, num_tokens_to_generate=2 + i)
        request.prompt = [3, 10, 9, 6, 8, 3]
        lanes.add(request)
    lanes.run()
    assert lanes.schedulers[0].num_preemptions == 0


@pytest.mark.parametrize("change", ["penalty", "min_tokens", "grammar", "recurrent"])
def test_requests_whose_rows_depend_on_others_are_not_drafted(change: str) -> None:
    limits = replace(LIMITS, num_draft_tokens=8, has_recurrent_layers=change == "recurrent")
    lanes = Lanes(limits)
    request = make_request(
        "a",
        1,
        num_tokens_to_generate=30,
        frequency_penalty=0.5 if change == "penalty" else 0.0,
        min_tokens=30 if change == "min_tokens" else 0,
    )
    request.matcher = CountingMatcher() if change == "grammar" else None
    request.prompt = [3, 10, 9, 6, 8] * 3
    lanes.add(request)
    lanes.run()
    assert lanes.schedulers[0].num_drafts == 0


def test_a_grammar_masks_the_sampled_row_and_decides_the_end() -> None:
    lanes = Lanes()
    request = make_request("a", 6, ignore_eos=True, num_tokens_to_generate=40)
    request.matcher = CountingMatcher()
    lanes.add(request)
    lanes.schedulers[0].limits = replace(LIMITS, max_step_tokens=4)
    first = lanes.step()
    second = lanes.step()
    assert first is not None
    assert second is not None
    assert first.masks == {}
    assert second.masks[0].tolist() == CountingMatcher().allowed().tolist()
    assert second.masks[0].dtype == np.int64
    lanes.schedulers[0].limits = LIMITS
    lanes.run()
    assert request.output[-1] == EOD
    assert lanes.outputs["a"][-1].finish_reason == "stop"


class LateMatcher(CountingMatcher):
    """Is not ready at every second question."""

    num_questions = 0

    def is_ready(self) -> bool:
        self.num_questions += 1
        return self.num_questions % 2 == 0


def test_a_text_whose_grammar_is_late_is_left_out_of_steps_and_loses_no_token() -> None:
    texts = []
    for matcher in (CountingMatcher(), LateMatcher()):
        lanes = Lanes()
        late = make_request("late", 3, num_tokens_to_generate=40)
        late.matcher = matcher
        lanes.add(late)
        lanes.add(make_request("other", 3, num_tokens_to_generate=8))
        num_segments = []
        while lanes.schedulers[0].has_unfinished:
            plan = lanes.step()
            num_segments.append(0 if plan is None else len(plan.segments))
        lanes.check()
        texts.append([request.output for request in lanes.requests.values()])
        has_gaps = 1 in num_segments[2:6]  # the other request alone
        assert has_gaps == isinstance(matcher, LateMatcher)
    assert texts[0] == texts[1]


def test_a_grammar_that_fails_ends_its_request_with_the_reason() -> None:
    lanes = Lanes()
    request = make_request("a", 3)
    request.matcher = CountingMatcher()
    lanes.add(request)
    request.matcher.error = "too much work"
    plan = lanes.schedulers[0].plan()
    assert plan is not None
    nothing = StepOutput(np.array([NO_TOKEN]), np.zeros(1, np.float32))
    (output,) = lanes.schedulers[0].record(plan, nothing)
    assert (output.finish_reason, output.error) == ("error", "too much work")
    assert output.error_param == "grammar"
    with pytest.raises(RequestError, match="too much work") as found:
        lanes.add(request)
    assert found.value.param == "grammar"


def test_grammars_that_cannot_be_followed_are_refused() -> None:
    lanes = Lanes()
    request = make_request("a", 6, min_tokens=3)
    request.grammar = ("regex", "a*")
    with pytest.raises(RequestError, match="this engine has no grammars: leave it out"):
        lanes.add(request)
    request.matcher = CountingMatcher()
    with pytest.raises(RequestError, match="min_tokens 3 does not go with a grammar, which"):
        lanes.add(request)
    lanes.run()
