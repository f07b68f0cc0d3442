"""Split text into sentences: by nltk's Punkt if it and its data are installed, else by rules."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

from megatron.core.optional import require, why_missing

logger = logging.getLogger(__name__)

_LONGEST_TEXT = 1_000_000  # characters passed to Punkt in one call
_END = re.compile(r"""[.!?\u2026]+["')\]\u201d\u2019]*\s+|[\u3002\uff01\uff1f]+\s*|\n\s*\n\s*""")
_OPENS_SENTENCE = re.compile(r"""["'(\[\u201c\u2018]*[^\W_a-z]|["'(\[\u201c\u2018]+\S""")
_LAST_WORD = re.compile(r"([^\s.]*(?:\.[^\s.]+)*)\.+\s*$")
# English words that end in a full stop inside a sentence.
_ABBREVIATIONS = frozenset(
    "mr mrs ms dr prof sr jr st rev gen col capt lt sgt gov sen rep hon messrs mme mlle "
    "vs etc al cf e.g i.e viz no vol pp fig eq ch sec ed eds inc ltd co corp dept univ assn "
    "jan feb mar apr jun jul aug sep sept oct nov dec a.m p.m u.s u.k u.n ph.d approx est".split()
)


# Text -> its sentences in order; every visible character is preserved.
SentenceSplitter = Callable[[str], list[str]]


class Punkt(Protocol):
    """Interface of nltk's trained splitter for one language."""

    def span_tokenize(self, text: str) -> Iterable[tuple[int, int]]:
        """Yield start and end of each sentence."""


def sentence_splitter(language: str, keep_newlines: bool) -> SentenceSplitter:
    """Return Punkt for ``language``; if it is missing, log a warning and return the rules."""
    reason = why_missing("nltk")
    if reason is None:
        nltk = require("nltk", "--split-sentences")
        try:
            punkt = nltk.tokenize.PunktTokenizer(language)
            return partial(split_by_punkt, punkt, keep_newlines)
        except (LookupError, AttributeError) as error:
            reason = "nltk has no punkt_tab data for " + language
            logger.debug("%s: %s", reason, error)
    logger.warning(
        "--split-sentences: %s, so sentences are split by simple rules made for English; "
        "install nltk and its punkt_tab data for what it learned of %s",
        reason,
        language,
    )
    return partial(split_by_rules, keep_newlines)


def split_by_punkt(punkt: Punkt, keep_newlines: bool, text: str) -> list[str]:
    """Return Punkt's sentences, with the blanks after each if ``keep_newlines``."""
    sentences = []
    for begin in range(0, len(text), _LONGEST_TEXT):
        piece = text[begin : begin + _LONGEST_TEXT]
        spans = list(punkt.span_tokenize(piece))
        if keep_newlines:
            starts = [start for start, _ in spans]
            spans = list(zip(starts, [*starts[1:], len(piece)], strict=False))
        sentences += [piece[start:end] for start, end in spans]
    return sentences


def split_by_rules(keep_newlines: bool, text: str) -> list[str]:
    """Split after an end mark if a capital follows, and at blank lines.

    No sentence ends after an abbreviation.
    """
    found = _END.finditer(text)
    ends = [end.end() for end in found if end.group().isspace() or _is_end(text, end)]
    sentences = [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]
    return [s if keep_newlines else s.strip() for s in sentences if s and not s.isspace()]


def _is_end(text: str, found: re.Match[str]) -> bool:
    if not _OPENS_SENTENCE.match(text, found.end()):
        return False
    before = _LAST_WORD.search(text, max(0, found.start() - 20), found.end())
    word = before.group(1).lower() if before else ""
    is_initial = len(word) == 1 and word.isalpha() and word != "i"
    return not (word in _ABBREVIATIONS or is_initial)
