"""Fill in the middle: what is reordered, what stays, and that nothing is lost."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from megatron.core.datasets.fill_in_middle import FillInMiddle

PREFIX, MIDDLE, SUFFIX, EOD, SPLIT = 1, 2, 3, 0, 4
SPECIAL = {PREFIX, MIDDLE, SUFFIX}


def fim(rate: float = 1.0, spm_rate: float = 0.0, **more: Any) -> FillInMiddle:
    return FillInMiddle(rate, spm_rate, PREFIX, MIDDLE, SUFFIX, EOD, **more)


def apply(settings: FillInMiddle, tokens: list[int], seed: int = 0) -> list[int]:
    done = settings.apply(np.array(tokens, np.int64), np.random.default_rng(seed))
    assert done.dtype == np.int64
    return [int(token) for token in done]


def parts_of(tokens: list[int], first: int, second: int, third: int) -> list[list[int]]:
    """The tokens behind each of three special tokens, which come in this order."""
    assert tokens[0] == first
    a, b = tokens.index(second), tokens.index(third)
    return [tokens[1:a], tokens[a + 1 : b], tokens[b + 1 :]]


@pytest.mark.parametrize("seed", range(30))
def test_psm_and_spm_hold_the_document_but_for_three_tokens(seed: int) -> None:
    document = list(range(10, 40))
    prefix, suffix, middle = parts_of(apply(fim(), document, seed), PREFIX, SUFFIX, MIDDLE)
    whole = prefix + middle + suffix
    assert whole == [token for token in document if token in whole]  # in their order
    assert len(whole) == len(document) - 3
    if len(suffix):
        assert whole == document[: len(whole)]  # the end of the suffix is left out
    spm = apply(fim(spm_rate=1.0), document, seed)
    empty, suffix_again, rest = parts_of(spm, PREFIX, SUFFIX, MIDDLE)
    assert (empty, suffix_again, rest) == ([], suffix, prefix + middle)


def test_documents_are_reordered_each_by_itself() -> None:
    documents = [list(range(10, 30)), list(range(30, 60)), list(range(60, 75))]
    tokens = [*documents[0], EOD, *documents[1], EOD, *documents[2]]
    done = apply(fim(), tokens)
    assert len(done) == len(tokens)
    assert [i for i, token in enumerate(done) if token == EOD] == [20, 51]
    for part, document in zip((done[:20], done[21:51], done[52:]), documents, strict=True):
        assert set(part) - SPECIAL <= set(document)
        assert set(part) >= SPECIAL
    missing = Counter(tokens) - Counter(done)
    assert sum(missing.values()) == 3 * len(documents)


def test_rates_are_shares_of_documents() -> None:
    tokens = [token for i in range(2000) for token in [*range(10, 70), EOD]]
    half = apply(fim(0.5, 0.25), tokens)
    assert abs(half.count(PREFIX) - 1000) < 100
    is_spm = sum(a == PREFIX and b == SUFFIX for a, b in zip(half, half[1:], strict=False))
    assert abs(is_spm - 250 - 750 * 2 / 61) < 80  # PSM with an empty prefix looks alike
    assert apply(fim(0.0), tokens) == tokens


def test_the_same_random_numbers_give_the_same_order() -> None:
    document = list(range(10, 60))
    assert apply(fim(), document, 5) == apply(fim(), document, 5) != apply(fim(), document, 6)


def test_fragments_are_reordered_instead_of_documents() -> None:
    files = [list(range(10, 30)), list(range(30, 50)), list(range(50, 70))]
    tokens = [*files[0], SPLIT, *files[1], SPLIT, *files[2], EOD]
    done = apply(fim(split=SPLIT, fragment_rate=1.0), tokens)
    assert [i for i, token in enumerate(done) if token == SPLIT] == [20, 41]
    assert done.count(PREFIX) == 3
    assert done[-1] == EOD
    assert apply(fim(split=SPLIT, fragment_rate=0.0), tokens) == tokens


def test_documents_that_begin_with_a_text_stay() -> None:
    tokens = [7, 8, *range(10, 30), EOD, *range(30, 50)]
    done = apply(fim(no_prefix=(7, 8)), tokens)
    assert done[:23] == tokens[:23]
    assert PREFIX in done[23:]


@pytest.mark.parametrize("count", [0, 1, 2])
def test_documents_too_short_for_the_special_tokens_stay(count: int) -> None:
    tokens = [*range(10, 10 + count), EOD]
    assert apply(fim(), tokens) == tokens


@pytest.mark.parametrize("count", [3, 4, 5])
def test_short_documents_keep_their_length(count: int) -> None:
    for seed in range(20):
        done = apply(fim(), list(range(10, 10 + count)), seed)
        assert len(done) == count
        assert set(done) >= SPECIAL
