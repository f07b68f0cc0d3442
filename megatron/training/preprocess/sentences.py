"""Text to sentences: nltk's Punkt where it and its data are here, else rules of our own."""

from __future__ import annotations

import logging
import re
from typing import Any, Protocol

from megatron.core.optional import require, why_missing

logger = logging.getLogger(__name__)

_LONGEST_TEXT = 1_000_000  # characters that Punkt is given at once
_END = re.compile(r"""[.!?\u2026]+["')\]\u201d\u2019]*\s+|[\u3002\uff01\uff1f]+\s*|\n\s*\n\s*""")
_OPENS_SENTENCE = re.compile(r"""["'(\[\u201c\u2018]*[^\W_a-z]|["'(\[\u201c\u2018]+\S""")
_LAST_WORD = re.compile(r"([^\s.]*(?:\.[^\s.]+)*)\.+\s*$")
# English words that end in a full stop inside a sentence.
_ABBREVIATIONS = frozenset(
    "mr mrs ms dr prof sr jr st rev gen col capt lt sgt gov sen rep hon messrs mme mlle "
    "vs etc al cf e.g i.e viz no vol pp fig eq ch sec ed eds inc ltd co corp dept univ assn "
    "jan feb mar apr jun jul aug sep sept oct nov dec a.m p.m u.s u.k u.n ph.d approx est".split()
)


class SentenceSplitter(Protocol):
    """Text to the sentences it consists of, in order; every visible character is kept."""

    def split(self, text: str) -> list[str]:
        """The sentences of ``text``."""


class PunktSplitter:
    """nltk's trained splitter of one language."""

    def __init__(self, punkt: Any, keep_newlines: bool) -> None:
        self._punkt = punkt
        self._keep_newlines = keep_newlines

    def split(self, text: str) -> list[str]:
        pieces = [text[i : i + _LONGEST_TEXT] for i in range(0, len(text), _LONGEST_TEXT)]
        return [sentence for piece in pieces for sentence in self._split_piece(piece)]

    def _split_piece(self, text: str) -> list[str]:
        spans = list(self._punkt.span_tokenize(text))
        if not self._keep_newlines:
            return [text[start:end] for start, end in spans]
        starts = [start for start, _ in spans]
        return [text[a:b] for a, b in zip(starts, [*starts[1:], len(text)], strict=True)]


class RuleSplitter:
    """A full stop, blanks and a capital end a sentence, unless an abbreviation stands before."""

    def __init__(self, keep_newlines: bool) -> None:
        self._keep_newlines = keep_newlines

    def split(self, text: str) -> list[str]:
        sentences, start = [], 0
        for end in (*self._ends(text), len(text)):
            sentence = text[start:end]
            if not sentence.isspace() and sentence:
                sentences.append(sentence if self._keep_newlines else sentence.strip())
            start = end
        return sentences

    def _ends(self, text: str) -> list[int]:
        ends = []
        for found in _END.finditer(text):
            blank_line = found.group().isspace()
            if blank_line or self._is_end(text, found):
                ends.append(found.end())
        return ends

    def _is_end(self, text: str, found: re.Match[str]) -> bool:
        if not _OPENS_SENTENCE.match(text, found.end()):
            return False
        before = _LAST_WORD.search(text, max(0, found.start() - 20), found.end())
        word = before.group(1).lower() if before else ""
        is_initial = len(word) == 1 and word.isalpha() and word != "i"
        return not (word in _ABBREVIATIONS or is_initial)


def sentence_splitter(language: str, keep_newlines: bool) -> SentenceSplitter:
    """Punkt for ``language``, or our rules after one warning that says why not."""
    reason = why_missing("nltk")
    if reason is None:
        nltk = require("nltk", "--split-sentences")
        try:
            return PunktSplitter(nltk.tokenize.PunktTokenizer(language), keep_newlines)
        except (LookupError, AttributeError) as error:
            reason = "nltk has no punkt_tab data for " + language
            logger.debug("%s: %s", reason, error)
    logger.warning(
        "--split-sentences: %s, so sentences are split by simple rules made for English; "
        "install nltk and its punkt_tab data for what it learned of %s",
        reason,
        language,
    )
    return RuleSplitter(keep_newlines)
