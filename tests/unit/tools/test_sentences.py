"""Sentences: Punkt where it is, else rules; nothing visible is lost."""

from __future__ import annotations

import logging
import re
from types import SimpleNamespace

import pytest

from megatron.training.preprocess import encode
from megatron.training.preprocess.encode import (
    sentence_splitter,
    split_by_punkt,
    split_by_rules,
)
from tests.support.tokenizer_files import corpus_texts


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("One is here. Two is there! Is three? Yes.", ["One is here.", "Two is there!",
                                                       "Is three?", "Yes."]),
        ("Mr. Smith met Dr. J. Doe at 3.5 p.m. in the U.S. today. He left.",
         ["Mr. Smith met Dr. J. Doe at 3.5 p.m. in the U.S. today.", "He left."]),
        ('He said "Go." Then he went.', ['He said "Go."', "Then he went."]),
        ("first paragraph\n\nsecond paragraph", ["first paragraph", "second paragraph"]),
        ("e.g. Paris, i.e. France.  So", ["e.g. Paris, i.e. France.", "So"]),
        ("\u4e00\u3002\u4e8c\uff01\u4e09", ["\u4e00\u3002", "\u4e8c\uff01", "\u4e09"]),
        ("no end", ["no end"]),
        ("", []),
    ],
)  # fmt: skip
def test_rules_split_where_a_reader_would(text, wanted):
    assert split_by_rules(False, text) == wanted


def test_no_visible_character_is_lost_and_newlines_only_if_not_asked_for():
    for text in corpus_texts()[:50]:
        kept = split_by_rules(True, text)
        assert "".join(kept) == text
        dropped = split_by_rules(False, text)
        assert re.sub(r"\s", "", "".join(dropped)) == re.sub(r"\s", "", text)


class FakePunkt:
    def span_tokenize(self, text):
        return [found.span() for found in re.finditer(r"\S[^.]*\.?", text)]


def test_punkt_gives_its_spans_and_keeps_newlines_when_asked():
    text = " One is.\nTwo is.  Three"
    assert split_by_punkt(FakePunkt(), False, text) == ["One is.", "Two is.", "Three"]
    assert split_by_punkt(FakePunkt(), True, text) == ["One is.\n", "Two is.  ", "Three"]


def test_punkt_of_the_language_is_taken_if_nltk_has_it(monkeypatch):
    asked = []

    def punkt(language):
        asked.append(language)
        return FakePunkt()

    nltk = SimpleNamespace(tokenize=SimpleNamespace(PunktTokenizer=punkt))
    monkeypatch.setattr(encode, "why_missing", lambda name: None)
    monkeypatch.setattr(encode, "require", lambda name, wanted_by: nltk)
    assert sentence_splitter("german", False)("a. b") == ["a.", "b"]
    assert asked == ["german"]


def test_without_nltk_or_its_data_the_rules_are_taken_with_one_warning(monkeypatch, caplog):
    def no_data(language):
        raise LookupError("punkt_tab not found")

    nltk = SimpleNamespace(tokenize=SimpleNamespace(PunktTokenizer=no_data))
    monkeypatch.setattr(encode, "require", lambda name, wanted_by: nltk)
    for reason in (None, "nltk is not installed"):
        caplog.clear()
        monkeypatch.setattr(encode, "why_missing", lambda name, reason=reason: reason)
        with caplog.at_level(logging.WARNING):
            assert sentence_splitter("german", False)("a. b C. D") == ["a. b C. D"]
        assert len(caplog.records) == 1
        assert (reason or "nltk has no punkt_tab data for german") in caplog.text
