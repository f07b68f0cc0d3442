"""Choose the fastest library that gives the same ids as a tokenizer's own library, its owner.

``gigatoken`` and ``tiktoken`` run byte-level BPE many times faster than the owner.  Each is
compared with the owner on a sample of the texts and on texts that probe Unicode and the special
tokens; a library with any difference is not used.
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

_PROBE_STRIDE = 128  # code points between samples; scripts are assigned in blocks
# Code points whose category varies; each of _UNIFORM has one throughout (ideographs, Hangul).
_MIXED = ((0, 0x3400), (0x4DB0, 0x4E10), (0x9FF0, 0xAC10), (0xD7A0, 0xD800), (0xF900, 0x17010),
          (0x1AFF0, 0x20000))  # fmt: skip
_UNIFORM = ((0x3400, 0x4DB0), (0x4E10, 0x9FF0), (0xAC10, 0xD7A0), (0xE000, 0xF900),
            (0x17010, 0x1AFF0), (0x20000, 0x33480))  # fmt: skip
_CHARACTERS_PER_TEXT = 32


class TextEncoder(Protocol):
    """Interface of an encoder, which converts many texts to ids in one call."""

    @property
    def name(self) -> str:
        """Name of the library, as in --tokenizer-backend."""

    @property
    def added_tokens(self) -> Sequence[str]:
        """Tokens that are matched in a text before it is split."""

    def encode_batch(self, texts: Sequence[str]) -> TokenBatch:
        """Return for each text the ids that the tokenizer's ``tokenize`` returns."""


# Fastest first.  Each returns None for rules that it cannot run.
_LIBRARIES: dict[str, Callable[[BpeRules, MegatronTokenizer], TextEncoder | None]] = {
    "gigatoken": GigatokenEncoder.load,
    "tiktoken": TiktokenEncoder.load,
}
BACKENDS = ("auto", *_LIBRARIES, "owner")


class OwnerEncoder:
    """Encoder that calls the tokenizer's own library."""

    name = "owner"
    added_tokens: Sequence[str] = ()

    def __init__(self, tokenizer: MegatronTokenizer) -> None:
        self.encode_batch = tokenizer.tokenize_batch


def candidates(tokenizer: MegatronTokenizer, backend: str = "auto") -> Iterator[TextEncoder]:
    """Yield the available encoders, from the fastest to the owner.

    An encoder is available if its library is installed and can run the rules of the tokenizer.
    Check each but the owner with `difference` before using its ids.  A ``backend`` other than auto
    requests one encoder; raises ConfigError if it is not available.
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
    """Return why ``encoder`` cannot replace ``tokenizer``; None if their ids are equal."""
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
    """Return texts on which tokenizers differ that split text at different places.

    One character of every run of equal Unicode category is placed next to letters, digits and
    blanks.  Then follow the special tokens within text, and long runs.
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
