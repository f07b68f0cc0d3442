"""The fastest library that gives a tokenizer's own ids.

``gigatoken`` and ``tiktoken`` run the rules of a byte-level BPE many times faster than the library
that owns them.  Each is compared with the owner before it is used, on a sample of the texts and
on a probe of Unicode and of the special tokens; any difference switches it off with a warning.
"""

from __future__ import annotations

import logging
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from megatron.core.config.errors import ConfigError
from megatron.core.optional import why_missing
from megatron.training.tokenizer.base import MegatronTokenizer, TokenBatch
from megatron.training.tokenizer.bpe_rules import BpeRules
from megatron.training.tokenizer.fast_gigatoken import GigatokenEncoder
from megatron.training.tokenizer.fast_tiktoken import TiktokenEncoder

logger = logging.getLogger(__name__)

BACKENDS = ("auto", "gigatoken", "tiktoken", "owner")
_PROBE_STRIDE = 128  # code points; scripts are assigned in blocks
# Ranges where categories change; the others are ideographs and Hangul, one kind throughout.
_MIXED = ((0, 0x3400), (0x4DB0, 0x4E10), (0x9FF0, 0xAC10), (0xD7A0, 0xD800), (0xF900, 0x17010),
          (0x1AFF0, 0x20000))  # fmt: skip
_UNIFORM = ((0x3400, 0x4DB0), (0x4E10, 0x9FF0), (0xAC10, 0xD7A0), (0xE000, 0xF900),
            (0x17010, 0x1AFF0), (0x20000, 0x33480))  # fmt: skip
_CHARACTERS_PER_TEXT = 32


class TextEncoder(Protocol):
    """Texts to ids, many at once."""

    name: str

    def encode_batch(self, texts: Sequence[str]) -> TokenBatch:
        """Text by text what the tokenizer's ``tokenize`` gives."""


class OwnerEncoder:
    """The library that owns the tokenizer."""

    name = "owner"

    def __init__(self, tokenizer: MegatronTokenizer) -> None:
        self.encode_batch = tokenizer.tokenize_batch


def choose_encoder(
    tokenizer: MegatronTokenizer, sample: Sequence[str], backend: str = "auto"
) -> TextEncoder:
    """The first of gigatoken, tiktoken and the owner that is here and gives the owner's ids.

    A ``backend`` other than auto asks for one of them; ConfigError if it cannot be had.
    """
    if backend == "owner":
        return OwnerEncoder(tokenizer)
    rules = tokenizer.bpe_rules()
    texts = [] if rules is None else [*probe_texts(rules.added_tokens), *sample]
    for name in ("gigatoken", "tiktoken") if backend == "auto" else (backend,):
        encoder, reason = _try(name, tokenizer, rules, texts)
        if encoder is not None:
            return encoder
        if backend != "auto":
            raise ConfigError(f"--tokenizer-backend {backend}: {reason}; use auto or owner")
    return OwnerEncoder(tokenizer)


def _try(
    name: str, tokenizer: MegatronTokenizer, rules: BpeRules | None, texts: Sequence[str]
) -> tuple[TextEncoder | None, str | None]:
    """The encoder, if it can be had and is right; else why not."""
    if rules is None:
        return None, f"{tokenizer.name} has no byte-level BPE"
    if reason := why_missing(name):
        return None, reason
    encoder: TextEncoder | None
    if name == "gigatoken":
        encoder = GigatokenEncoder.load(rules)
    else:
        encoder = TiktokenEncoder.load(rules, tokenizer)
    if encoder is None:
        return None, f"{name} cannot run these rules"
    text = first_difference(tokenizer, encoder, texts)
    if text is None:
        return encoder, None
    reason = f"{name} gives other ids than the tokenizer's own library, for {text!r}"
    logger.warning("%s; it is switched off", reason)
    return None, reason


def first_difference(
    tokenizer: MegatronTokenizer, encoder: TextEncoder, texts: Sequence[str]
) -> str | None:
    """The start of the first text whose ids differ from the owner's; None if none does."""
    if _equal(tokenizer.tokenize_batch(texts), encoder.encode_batch(texts)):
        return None
    for text in texts:
        if not _equal(tokenizer.tokenize_batch([text]), encoder.encode_batch([text])):
            return text[:80]
    return "(all of the sample together)"


def _equal(wanted: TokenBatch, found: TokenBatch) -> bool:
    return np.array_equal(wanted.lengths, found.lengths) and np.array_equal(wanted.ids, found.ids)


def probe_texts(added_tokens: Iterable[str]) -> list[str]:
    """Texts on which two tokenizers differ that cut text at other places.

    A character of every run of one Unicode category stands between letters, between digits and
    alone; then the special tokens in a text, and long runs.
    """
    characters = _one_of_each_kind()
    texts = [
        "".join(f"a{c}b {c}1{c} {c}\n" for c in characters[i : i + _CHARACTERS_PER_TEXT])
        for i in range(0, len(characters), _CHARACTERS_PER_TEXT)
    ]
    texts += [f"a{token}b {token} c{token}{token}" for token in added_tokens]
    texts += ["", " ", "\n\n \r\n\t ", " " * 200 + "x", "x" * 700, "=" * 300, "0123456789" * 20]
    return [*texts, "don't I'LL we'Re it'S CamelCase HTTPServer 3.14e-10 https://a.b/c?d=e#f_g"]


def _one_of_each_kind() -> list[str]:
    category = unicodedata.category
    found = []
    for start, end in _MIXED:
        kind = ""
        for character in map(chr, range(start, end)):
            if category(character) != kind:
                kind = category(character)
                found.append(character)
    for start, end in (*_MIXED, *_UNIFORM):
        found += map(chr, range(start, end, _PROBE_STRIDE))
    return found
