"""Text that a grammar constrains: what a sampler writes always parses."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from megatron.core.inference.grammar import GrammarMatcher, Grammars
from megatron.core.inference.paged_engine.request import QueueFullError, RequestError
from megatron.core.inference.paged_engine.sampler import Sampler
from megatron.core.inference.paged_engine.step_plan import (
    NO_TOKEN,
    SAMPLE,
    Admission,
    Segment,
    StepPlan,
)
from tests.unit.inference.test_sampler import CPU

pytest.importorskip("llguidance")

EOD = 5
PIECES = [
    b"true",
    b'{"',
    b'":',
    b'"}',
    b"12",
    b", ",
    b"\xf0\x9f",
    b"\x98\x80",
    b"yes",
    b"",
    b"ab",
    b"aaaa",
]
TOKENS = [*(bytes([i]) for i in range(256)), None, *PIECES]
TOKENS[EOD] = None


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    found = Grammars(TOKENS, EOD)
    yield found
    found.close()


def reason_of(grammars: Grammars, kind: str, text: str) -> str:
    """Return why a grammar is refused."""
    matcher = grammars.matcher(kind, text)
    assert tokens_of(matcher) == set()
    return matcher.error


def written(matcher: GrammarMatcher, seed: int, longest: int = 2000) -> bytes:
    """Return the text that a model without knowledge writes under ``matcher``."""
    sampler = Sampler(1, len(TOKENS), CPU, EOD)
    sampler.admit(Admission(0, {"seed": seed, "temperature": 1.5}, num_prompt=1))
    generator = torch.Generator().manual_seed(seed)
    text = b""
    nothing = np.zeros(0, dtype=np.int64)
    for position in range(1, longest):
        row = Segment(0, position - 1, np.array([0]), nothing, np.array([SAMPLE]))
        plan = StepPlan([row], masks={0: matcher.allowed().astype(np.int64)})
        logits = torch.randn(1, len(TOKENS), generator=generator) * 2
        token = int(sampler.sample(logits, plan).tokens[0])
        assert token != NO_TOKEN, (matcher.error, text)
        if token == EOD:
            return text
        matcher.accept(token)
        text += TOKENS[token] or b""
    raise AssertionError(f"no end: {text!r}")


def is_person(text: str) -> bool:
    found = json.loads(text)
    return (
        found.keys() == {"name", "age", "tags"}
        and len(found["name"]) <= 6
        and found["age"] in range(130)
        and set(found["tags"]) <= {"a", "b"}
    )


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 129},
        "tags": {"type": "array", "maxItems": 3, "items": {"enum": ["a", "b"]}},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
DATE = r"(19|20)[0-9]{2}-(0[1-9]|1[0-2])-[0-3][0-9]"


@pytest.mark.feature("Generation: text follows a JSON schema or regular expression")
@pytest.mark.parametrize(
    ("kind", "text", "fits"),
    [
        ("json_schema", json.dumps(PERSON), is_person),
        ("json_schema", '{"type": "boolean"}', lambda t: isinstance(json.loads(t), bool)),
        ("regex", DATE, lambda t: re.fullmatch(DATE, t)),
        ("lark", 'start: "a\\"b" | "c d\\n" | "\\u00e4"', ['a"b', "c d\n", "\xe4"].__contains__),
    ],
)
def test_what_is_sampled_always_fits_the_grammar(
    grammars: Grammars, kind: str, text: str, fits: Callable[[str], Any]
) -> None:
    found = {written(grammars.matcher(kind, text), seed) for seed in range(25)}
    assert all(fits(text.decode()) for text in found)
    assert len(found) > 1


def tokens_of(matcher: GrammarMatcher) -> set[int]:
    words = matcher.allowed()
    return {t for t in range(32 * len(words)) if words[t // 32] >> (t % 32) & 1}


def test_tokens_of_several_bytes_are_allowed_and_special_ones_are_not(grammars: Grammars) -> None:
    matcher = grammars.matcher("regex", "(true|\U0001f600|\x05)")
    pieces = {TOKENS.index(b"true"), ord("t"), TOKENS.index(b"\xf0\x9f"), 0xF0}
    assert tokens_of(matcher) == pieces  # token 5 is the end of a document, not byte 5
    matcher.accept(ord("x"))
    assert tokens_of(matcher) == set()
    assert matcher.error


def test_requests_with_one_grammar_do_not_share_their_texts(grammars: Grammars) -> None:
    first, second = (grammars.matcher("regex", "ab?") for _ in range(2))
    first.accept(ord("a"))
    second.accept(ord("a"))
    first.accept(ord("b"))
    assert tokens_of(first) == {EOD}
    assert tokens_of(second) == {EOD, ord("b")}


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        ("json_schema", '{"type": "strng"}', "json_schema grammar: Invalid type: strng"),
        ("json_schema", "{", "json_schema grammar: EOF while parsing"),
        ("json_schema", "[1]", "schema must be an object or boolean"),
        ("json_schema", "false", "Unsatisfiable schema"),
        ("json_schema", '{"minimum": 3, "maximum": 2, "type": "integer"}', "Unsatisfiable schema"),
        ("json_schema", '{"$ref": "http://example.com/a"}', "does not fetch"),
        ("json_schema", '{"$ref": "file:///etc/passwd"}', "does not fetch"),
        ("json_schema", '{"a":' + "[" * 9000 + "]" * 9000 + "}", "recursion limit"),
        ("regex", "(", "unclosed group"),
        ("regex", "(?=a)b", "look-around"),
        ("regex", "a{100000}", "more than 8192 bytes"),
        ("regex", r"[^\x00-\x{10ffff}]", "no text of this vocabulary fits"),
        ("regex", "\ud800", "surrogates"),
    ],
)
def test_a_grammar_that_no_text_fits_or_that_is_hostile_is_refused(
    grammars: Grammars, kind: str, text: str, reason: str
) -> None:
    found = reason_of(grammars, kind, text)
    assert reason in found
    assert len(found) < 400


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        ("json_schema", " " * 70000, "of 70000 characters: at most 65536"),
        ("yaml", "", "grammar of kind 'yaml': give json_schema, regex or lark"),
    ],
)
def test_a_grammar_of_no_kind_or_too_long_is_refused_at_once(
    grammars: Grammars, kind: str, text: str, reason: str
) -> None:
    with pytest.raises(RequestError, match=reason) as error:
        grammars.matcher(kind, text)
    assert error.value.param == "grammar"


INTERSECTION = json.dumps(
    {"allOf": [{"type": "string", "pattern": f".*a.{{{i}}}"} for i in range(30)]}
)


@pytest.mark.parametrize(
    ("kind", "text"), [("json_schema", INTERSECTION), ("regex", "(a{1000}){1000}")]
)
def test_a_grammar_that_takes_too_long_is_refused_while_others_are_followed(
    grammars: Grammars, kind: str, text: str
) -> None:
    hostile = grammars.matcher(kind, text)
    assert not hostile.is_ready()
    other = grammars.matcher("regex", "a[bc]")
    assert tokens_of(other) == {ord("a"), TOKENS.index(b"ab")}
    other.accept(ord("a"))
    assert tokens_of(other) == {ord("b"), ord("c")}
    assert tokens_of(hostile) == set()
    assert hostile.error.startswith(f"{kind} grammar: ")
    assert tokens_of(other) == {ord("b"), ord("c")}


def test_a_text_that_takes_too_long_later_ends_without_harm_to_other_grammars(
    grammars: Grammars,
) -> None:
    hostile = grammars.matcher("regex", "b|c(a{1000}){1000}")
    tokens_of(hostile)
    other = grammars.matcher("regex", "a[bc]")
    assert tokens_of(other)
    hostile.accept(ord("c"))
    other.accept(ord("a"))
    assert tokens_of(other) == {ord("b"), ord("c")}
    assert tokens_of(hostile) == set()
    assert hostile.error


def test_a_request_without_a_process_for_its_grammar_is_told_to_come_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grammars = Grammars(TOKENS, EOD)
    monkeypatch.setattr("megatron.core.inference.grammar._MOST_GRAMMARS", 2)
    matchers = [grammars.matcher("regex", f"x{i}") for i in range(2)]
    with pytest.raises(QueueFullError, match="2 grammars are in use"):
        grammars.matcher("regex", "x2")
    del matchers[0]
    assert tokens_of(grammars.matcher("regex", "x2"))
    grammars.close()


def test_grammars_go_on_after_the_end_of_their_first_process() -> None:
    before = {*multiprocessing.active_children()}
    grammars = Grammars(TOKENS, EOD)
    matcher = grammars.matcher("regex", "x+")
    assert tokens_of(matcher)
    (process,) = {*multiprocessing.active_children()} - before
    process.kill()
    process.join()
    assert tokens_of(grammars.matcher("regex", "y+"))
    matcher.accept(ord("x"))
    assert tokens_of(matcher)
    grammars.close()


def test_a_grammar_whose_process_is_stopped_fails_once(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {*multiprocessing.active_children()}
    grammars = Grammars(TOKENS, EOD)
    assert tokens_of(grammars.matcher("regex", "x+"))
    (process,) = {*multiprocessing.active_children()} - before
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    matchers = [grammars.matcher("regex", "y+") for _ in range(2)]
    with monkeypatch.context() as patch:
        patch.setattr("megatron.core.inference.grammar._PATIENCE_S", 0.0)
        assert tokens_of(matchers[0]) == set()
    assert matchers[1].is_ready()
    assert {m.error for m in matchers} == {"regex grammar: its process has not answered for 0 s"}
    assert tokens_of(grammars.matcher("regex", "y+")) == {ord("y")}
    process.join()
    grammars.close()


def test_a_grammar_that_needs_too_much_work_later_allows_no_token(grammars: Grammars) -> None:
    matcher = grammars.matcher("regex", "b|a{9000}")
    assert tokens_of(matcher) == {ord("b"), ord("a"), TOKENS.index(b"aaaa")}
    matcher.accept(ord("a"))
    assert tokens_of(matcher) == set()
    assert "more than 8192 bytes" in matcher.error
