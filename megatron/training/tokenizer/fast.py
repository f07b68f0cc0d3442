"""The fastest library that gives a tokenizer's own ids.

``gigatoken`` and ``tiktoken`` run the rules of a byte-level BPE many times faster than the library
that owns them.  Each is compared with the owner on a sample of the texts and on a probe of Unicode
and of the special tokens; any difference rules it out.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np

from megatron.core.config.errors import ConfigError
from megatron.core.optional import why_missing
from megatron.training.tokenizer.base import MegatronTokenizer, TokenBatch
from megatron.training.tokenizer.bpe_rules import BpeRules
from megatron.training.tokenizer.fast_gigatoken import GigatokenEncoder
from megatron.training.tokenizer.fast_tiktoken import TiktokenEncoder

_PROBE_STRIDE = 128  # code points; scripts are assigned in blocks
# Ranges where categories change; the others are ideographs and Hangul, one kind throughout.
_MIXED = ((0, 0x3400), (0x4DB0, 0x4E10), (0x9FF0, 0xAC10), (0xD7A0, 0xD800), (0xF900, 0x17010),
          (0x1AFF0, 0x20000))  # fmt: skip
_UNIFORM = ((0x3400, 0x4DB0), (0x4E10, 0x9FF0), (0xAC10, 0xD7A0), (0xE000, 0xF900),
            (0x17010, 0x1AFF0), (0x20000, 0x33480))  # fmt: skip
_CHARACTERS_PER_TEXT = 32


class TextEncoder(Protocol):
    """Texts to ids, many at once."""

    @property
    def name(self) -> str:
        """Of the library, as --tokenizer-backend has it."""

    @property
    def added_tokens(self) -> Sequence[str]:
        """Words found in a text before it is cut."""

    def encode_batch(self, texts: Sequence[str]) -> TokenBatch:
        """Text by text what the tokenizer's ``tokenize`` gives."""


# The fastest first; each gives None for rules that it cannot run.
_LIBRARIES: dict[str, Callable[[BpeRules, MegatronTokenizer], TextEncoder | None]] = {
    "gigatoken": GigatokenEncoder.load,
    "tiktoken": TiktokenEncoder.load,
}
BACKENDS = ("auto", *_LIBRARIES, "owner")


class OwnerEncoder:
    """The library that owns the tokenizer."""

    name = "owner"
    added_tokens: Sequence[str] = ()

    def __init__(self, tokenizer: MegatronTokenizer) -> None:
        self.encode_batch = tokenizer.tokenize_batch


def candidates(tokenizer: MegatronTokenizer, backend: str = "auto") -> Iterator[TextEncoder]:
    """Encoders from the fastest to the owner, those that are here and can run these rules.

    Each but the owner is to be held to ``difference`` before its ids are used.  A ``backend``
    other than auto asks for one of them; ConfigError if it cannot be had.
    """
    rules = tokenizer.bpe_rules()
    for name, load in _LIBRARIES.items():
        if backend not in ("auto", name):
            continue
        reason = why_missing(name)
        encoder = None
        if rules is None:
            reason = f"{tokenizer.name} has no byte-level BPE"
        elif reason is None:
            encoder = load(rules, tokenizer)
        if encoder is not None:
            yield encoder
        elif backend == name:
            reason = reason or f"{name} cannot run these rules"
            raise ConfigError(f"--tokenizer-backend {backend}: {reason}; use auto or owner")
    if backend in ("auto", "owner"):
        yield OwnerEncoder(tokenizer)


def difference(
    tokenizer: MegatronTokenizer, encoder: TextEncoder, sample: Sequence[str]
) -> str | None:
    """Why ``encoder`` must not stand in for ``tokenizer``; None if its ids are the owner's."""
    if isinstance(encoder, OwnerEncoder):
        return None
    texts = [*probe_texts(encoder.added_tokens), *sample]
    if _equal(tokenizer.tokenize_batch(texts), encoder.encode_batch(texts)):
        return None
    for text in texts:
        if not _equal(tokenizer.tokenize_batch([text]), encoder.encode_batch([text])):
            break
    return f"{encoder.name} gives other ids than the tokenizer's own library, for {text[:80]!r}"


def _equal(wanted: TokenBatch, found: TokenBatch) -> bool:
    return np.array_equal(wanted.lengths, found.lengths) and np.array_equal(wanted.ids, found.ids)


def probe_texts(added_tokens: Iterable[str]) -> list[str]:
    """Texts on which two tokenizers differ that cut text at other places.

    A character of every run of one Unicode category stands between letters, between digits and
    alone; then the special tokens in a text, and long runs.
    """
    characters = _one_of_each_kind()
    texts = [
        "".join(f"a{c}1{c} {c}\n" for c in characters[i : i + _CHARACTERS_PER_TEXT])
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
