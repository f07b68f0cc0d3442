"""Encode byte-level BPE with ``gigatoken``, many times faster than a tokenizer's own library.

The ids are compared with those of the own library, the owner, on a sample of the texts and on texts
that probe Unicode and the special tokens; with any difference, gigatoken is not used.
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import TypeAlias

import numpy as np

from megatron.core.config.errors import ConfigError
from megatron.core.optional import require, why_missing
from megatron.training.tokenizer.base import BpeRules, MegatronTokenizer, TokenBatch, surround
from megatron.training.tokenizer.tiktoken import CustomTikTokenizer

BACKENDS = ("auto", "gigatoken", "owner")
_SHORT_TEXT = 400  # mean characters per text below which one call for all texts is faster
_MEMORY_GROWTH = 1 << 30  # bytes of cached words after which the encoder is rebuilt
_CANNOT_RUN = (RuntimeError, ValueError, TypeError, KeyError)  # of gigatoken, for some rules


class GigatokenEncoder:
    """Encoder on the calling thread only: worker processes already use all cores.

    gigatoken caches the ids of every word that it has met.
    """

    name = "gigatoken"

    def __init__(self, rules: BpeRules, memory_growth: int = _MEMORY_GROWTH) -> None:
        self._rules = rules
        self.added_tokens = rules.added_tokens
        self._memory_growth = memory_growth
        self._start_afresh()

    def encode_batch(self, texts: Sequence[str]) -> TokenBatch:
        """Return for each text the ids that the tokenizer's ``tokenize`` returns."""
        if _resident_bytes() - self._resident_before > self._memory_growth:
            self._start_afresh()
        if sum(map(len, texts)) < _SHORT_TEXT * len(texts):
            layout = self._bpe.encode_batch(list(texts), parallel=False).layout
            offsets = np.asarray(layout.offsets.data)
            ids = np.asarray(layout.content.data)[offsets[0] : offsets[-1]]
            lengths = np.diff(offsets)
        else:
            rows = [self._bpe.encode(text) for text in texts]
            lengths = np.fromiter(map(len, rows), np.int64, len(rows))
            ids = np.concatenate([np.empty(0, np.int32), *rows])
        batch = TokenBatch(ids.astype(np.int32), lengths)
        return surround(batch, self._rules.prefix, self._rules.suffix)

    def _start_afresh(self) -> None:
        rust = require("gigatoken", "--tokenizer-backend gigatoken").gigatoken_rs
        self._bpe = rust.load_hf_json(self._rules.tokenizer_json)
        self._resident_before = _resident_bytes()


def _resident_bytes() -> int:
    """Return the resident memory of this process."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class OwnerEncoder:
    """Encoder that calls the tokenizer's own library."""

    name = "owner"

    def __init__(self, tokenizer: MegatronTokenizer) -> None:
        self.encode_batch = tokenizer.tokenize_batch


TextEncoder: TypeAlias = GigatokenEncoder | OwnerEncoder


def candidates(tokenizer: MegatronTokenizer, backend: str) -> Iterator[TextEncoder]:
    """Yield gigatoken's encoder, if it is installed and runs the tokenizer's rules, and the owner.

    Check it with `difference` before using its ids.  A ``backend`` other than auto requests one
    encoder; raises ConfigError if it is not available.
    """
    if backend != "owner":
        rules = tokenizer.bpe_rules()
        reason = why_missing("gigatoken")
        if rules is None:
            reason = f"{tokenizer.name} has no byte-level BPE"
        elif reason is None:
            try:
                encoder = GigatokenEncoder(rules)
            except _CANNOT_RUN as error:
                reason = f"gigatoken cannot run these rules: {str(error).splitlines()[0]}"
            else:
                yield encoder
        if reason is not None and backend == "gigatoken":
            raise ConfigError(f"--tokenizer-backend gigatoken: {reason}; use auto or owner")
    if backend != "gigatoken":
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
    return all(map(np.array_equal, wanted, found))


_PROBE_STRIDE = 128  # code points between samples; scripts are assigned in blocks
_CHARACTERS_PER_TEXT = 32
# Code points whose category varies; each block between them has one (ideographs, Hangul).
_MIXED = (
    range(0x3400),
    range(0x4DB0, 0x4E10),
    range(0x9FF0, 0xAC10),
    range(0xD7A0, 0xD800),
    range(0xF900, 0x17010),
    range(0x1AFF0, 0x20000),
)


def probe_texts(added_tokens: Iterable[str]) -> list[str]:
    """Return texts on which tokenizers differ that split text at different places.

    One character of every run of equal Unicode category is placed next to letters, digits and
    blanks.  Then follow the special tokens within text, and long runs.
    """
    probes = [
        next(run) for codes in _MIXED for _, run in groupby(map(chr, codes), unicodedata.category)
    ]
    probes += map(chr, range(0, 0xD800, _PROBE_STRIDE))
    probes += map(chr, range(0xE000, 0x33480, _PROBE_STRIDE))
    texts = [
        "".join(f"a{c}1{c} {c}\n" for c in probes[i : i + _CHARACTERS_PER_TEXT])
        for i in range(0, len(probes), _CHARACTERS_PER_TEXT)
    ]
    texts += [f"a{token}b {token} c{token}{token}" for token in added_tokens]
    texts += ["", " ", "\n\n \r\n\t ", " " * 200 + "x", "x" * 700, "=" * 300, "0123456789" * 20]
    return [*texts, "don't I'LL we'Re it'S CamelCase HTTPServer 3.14e-10 https://a.b/c?d=e#f_g"]


_ROLES = ("eod", "bos", "eos", "pad", "cls", "sep", "mask")
_SPACE = "\u2581"  # SentencePiece's sign for a space
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # SentencePiece's token of one byte
_PROBE = 'Hello {"a": [1, "two"]}\n'


def token_bytes(tokenizer: MegatronTokenizer) -> list[bytes | None] | None:
    """Return the bytes of each id; None for special tokens, which no text has.

    Return None for a tokenizer whose texts are not the joined bytes of their tokens.
    """
    try:
        probe = tokenizer.tokenize(_PROBE)
    except ValueError:
        return None  # it reads numbers only
    special = {tokenizer.id_of(role) for role in _ROLES}
    special |= {tokenizer.vocab.get(token) for token in tokenizer.appended_tokens()}
    if isinstance(tokenizer, CustomTikTokenizer):
        every: dict[int, bytes] = {i: tokenizer.bytes_of(i) for i in tokenizer.inv_vocab}
    else:
        every = _bytes_of_names(tokenizer.inv_vocab)
    found = [None if i in special else every.get(i) for i in range(tokenizer.vocab_size)]
    ids = [i for i in probe if i not in special]
    text = b"".join(found[i] or b"" for i in ids).decode(errors="replace")
    return found if text.strip() == _PROBE.strip() else None


def _bytes_of_names(names: Mapping[int, str]) -> dict[int, bytes]:
    """Return the bytes that the names of tokens stand for."""
    table = byte_of_character()
    if any("\u0120" in name for name in names.values()):  # the sign for a space of a byte-level BPE
        known = {i: name for i, name in names.items() if table.keys() >= set(name)}
        return {i: bytes(map(table.__getitem__, name)) for i, name in known.items()}
    found = {}
    for i, name in names.items():
        byte = _BYTE.fullmatch(name)
        found[i] = bytes.fromhex(byte[1]) if byte else name.replace(_SPACE, " ").encode()
    return found


def byte_of_character() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for.

    Printable Latin-1 characters stand for themselves.  The characters from U+0100 on stand for the
    other bytes, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return dict(zip(map(chr, (*printable, *range(0x100, 0x144))), printable + others, strict=True))
