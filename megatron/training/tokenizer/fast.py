"""Choose the fastest library that gives the same ids as a tokenizer's own library, its owner.

``gigatoken`` and ``tiktoken`` run byte-level BPE many times faster than the owner.  Each is
compared with the owner on a sample of the texts and on texts that probe Unicode and the special
tokens; a library with any difference is not used.

``gigatoken`` caches the ids of every word that it has met.  ``tiktoken`` merges the neighbours
whose joined bytes have the lowest rank; the rules merge the pair that comes first in a list.  The
two agree if the list makes each token once, in order of rank, and every token's own bytes merge
back into it.
"""

from __future__ import annotations

import json
import logging
import os
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np

from megatron.core.config.errors import ConfigError
from megatron.core.config.value_types import JsonObject
from megatron.core.optional import require, why_missing
from megatron.training.tokenizer.base import (
    BpeRules,
    MegatronTokenizer,
    TokenBatch,
    byte_of_character,
    pack,
    replace_rows,
    surround,
)
from megatron.training.tokenizer.tiktoken import CustomTikTokenizer

logger = logging.getLogger(__name__)

_SHORT_TEXT = 400  # mean characters per text below which one call for all texts is faster
_MEMORY_GROWTH = 1 << 30  # bytes of cached words after which the encoder is rebuilt


class GigatokenEncoder:
    """Encoder on the calling thread only: worker processes already use all cores."""

    name = "gigatoken"

    def __init__(self, rules: BpeRules, memory_growth: int = _MEMORY_GROWTH) -> None:
        self._rules = rules
        self.added_tokens = rules.added_tokens
        self._memory_growth = memory_growth
        self._start_afresh()

    @classmethod
    def load(cls, rules: BpeRules, _owner: MegatronTokenizer) -> GigatokenEncoder | None:
        """Return an encoder; None, with the reason logged, if gigatoken cannot run these rules."""
        try:
            return cls(rules)
        except (RuntimeError, ValueError, TypeError, KeyError) as error:
            logger.info("gigatoken cannot run these rules: %s", str(error).splitlines()[0])
            return None

    def encode_batch(self, texts: Sequence[str]) -> TokenBatch:
        if _resident_bytes() - self._resident_before > self._memory_growth:
            self._start_afresh()
        if sum(map(len, texts)) < _SHORT_TEXT * len(texts):
            batch = self._encode_short(texts)
        else:
            rows = [self._bpe.encode(text) for text in texts]
            lengths = np.fromiter(map(len, rows), np.int64, len(rows))
            ids = np.concatenate(rows) if rows else np.empty(0, np.int32)
            batch = TokenBatch(ids.astype(np.int32), lengths)
        return surround(batch, self._rules.prefix, self._rules.suffix)

    def _encode_short(self, texts: Sequence[str]) -> TokenBatch:
        layout = self._bpe.encode_batch(list(texts), parallel=False).layout
        offsets = np.asarray(layout.offsets.data)
        ids = np.asarray(layout.content.data)[offsets[0] : offsets[-1]]
        return TokenBatch(ids.astype(np.int32), np.diff(offsets))

    def _start_afresh(self) -> None:
        rust = require("gigatoken", "--tokenizer-backend gigatoken").gigatoken_rs
        self._bpe = rust.load_hf_json(self._rules.tokenizer_json)
        self._resident_before = _resident_bytes()


def _resident_bytes() -> int:
    """Return the resident memory of this process."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


_GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# tiktoken's pattern engine runs out of stack on longer runs of blanks.
_BLANKS_TOO_LONG = re.compile(r"\s{10000}")
_LONG_TEXT = 10000


class Encoding(Protocol):
    """Interface of `tiktoken.Encoding`, as far as it is used."""

    special_tokens_set: set[str]

    def encode(
        self, text: str, *, allowed_special: str, disallowed_special: tuple[str, ...]
    ) -> list[int]:
        """Return the ranks of a text, recognizing its special tokens."""

    def encode_ordinary(self, text: str) -> list[int]:
        """Return the ranks of a text, treating special tokens as ordinary text."""


class TiktokenEncoder:
    """Encoder on the calling thread only: worker processes already use all cores.

    Texts with very long runs of blanks are passed to the owner.
    """

    name = "tiktoken"

    def __init__(self, encoding: Encoding, rules: BpeRules, ids: np.ndarray,
                 owner: MegatronTokenizer) -> None:  # fmt: skip
        self.encoding = encoding
        self._rules = rules
        self.added_tokens = rules.added_tokens
        self.ids = ids  # int32 [ranks]: the owner's id of each rank
        self._owner = owner
        self._has_specials = bool(encoding.special_tokens_set)

    @classmethod
    def load(cls, rules: BpeRules, owner: MegatronTokenizer) -> TiktokenEncoder | None:
        """Return an encoder; None, with the reason logged, if tiktoken would merge differently."""
        tokenizer_json = json.loads(rules.tokenizer_json)
        pattern = _pattern(tokenizer_json)
        ranks = _ranks(tokenizer_json["model"])
        specials = _specials(tokenizer_json["added_tokens"], len(ranks or ()))
        if pattern is None or ranks is None or specials is None:
            logger.info("tiktoken cannot run these rules")
            return None
        library = require("tiktoken", "--tokenizer-backend tiktoken")
        encoding = library.Encoding(
            "rules", pat_str=pattern, mergeable_ranks=ranks, special_tokens=specials
        )
        vocab = tokenizer_json["model"]["vocab"]
        character = {byte: c for c, byte in byte_of_character().items()}
        ids = [vocab["".join(map(character.__getitem__, token))] for token in ranks]
        added = {token["content"]: token["id"] for token in tokenizer_json["added_tokens"]}
        ids += [added[content] for content in specials]
        return cls(encoding, rules, np.asarray(ids, np.int32), owner)

    def encode_batch(self, texts: Sequence[str]) -> TokenBatch:
        endless = [i for i, text in enumerate(texts) if _has_endless_blanks(text)]
        ranks = pack([[] if i in endless else self._encode(t) for i, t in enumerate(texts)])
        ids = TokenBatch(self.ids[ranks.ids], ranks.lengths)
        batch = surround(ids, self._rules.prefix, self._rules.suffix)
        return replace_rows(batch, {i: self._owner.tokenize_batch([texts[i]]).ids for i in endless})

    def _encode(self, text: str) -> list[int]:
        text.encode()  # raises for a lone surrogate, as the owner does; tiktoken replaces it
        if self._has_specials:
            return self.encoding.encode(text, allowed_special="all", disallowed_special=())
        return self.encoding.encode_ordinary(text)


def _has_endless_blanks(text: str) -> bool:
    return len(text) >= _LONG_TEXT and _BLANKS_TOO_LONG.search(text) is not None


def _pattern(tokenizer_json: JsonObject) -> str | None:
    """Return the regular expression by which the rules split a text; None if they do more."""
    if tokenizer_json["normalizer"] is not None:
        return None
    step = tokenizer_json["pre_tokenizer"] or {}
    steps = step["pretokenizers"] if step.get("type") == "Sequence" else [step]
    if not steps or steps[-1].get("type") != "ByteLevel" or steps[-1]["add_prefix_space"]:
        return None
    if steps[-1]["use_regex"]:
        return _GPT2_PATTERN if len(steps) == 1 else None
    if len(steps) != 2 or steps[0]["type"] != "Split" or "Regex" not in steps[0]["pattern"]:
        return None
    plain = steps[0]["behavior"] == "Isolated" and not steps[0]["invert"]
    return steps[0]["pattern"]["Regex"] if plain else None


def _ranks(model: JsonObject) -> dict[bytes, int] | None:
    """Return bytes -> rank of every token, in the order of the merges; None if ranks do not fit."""
    unusual = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    if model["type"] != "BPE" or any(map(model.get, unusual)):
        return None
    byte_of = byte_of_character()
    vocab = model["vocab"]
    ranks = {bytes([byte]): byte for byte in range(256)}
    if any(character not in vocab for character in byte_of):
        return None
    pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
    for left, right in pairs:
        joined = left + right
        if any(character not in byte_of for character in joined):
            return None
        ranks.setdefault(bytes(map(byte_of.__getitem__, joined)), len(ranks))
    made_once = len(ranks) == 256 + len(pairs)
    return ranks if made_once and _tokens_merge_back(model, pairs) else None


def _tokens_merge_back(model: JsonObject, pairs: Sequence[Sequence[str]]) -> bool:
    """Return whether the merges alone turn the bytes of every token into that token."""
    if model.get("ignore_merges"):
        return True  # both libraries look up a complete piece before they merge
    library = require("tokenizers", "--tokenizer-backend tiktoken")
    tokens = [left + right for left, right in pairs]
    merges = [(left, right) for left, right in pairs]
    bpe = library.Tokenizer(library.models.BPE(model["vocab"], merges, cache_capacity=0))
    encoded = bpe.encode_batch_fast(tokens, add_special_tokens=False)
    return all(row.ids == [model["vocab"][t]] for row, t in zip(encoded, tokens, strict=True))


def _specials(added: Sequence[JsonObject], first_rank: int) -> dict[str, int] | None:
    """Return ranks of the added tokens; None if tiktoken cannot match them in the same way."""
    contents = [token["content"] for token in added]
    bent = any(token["lstrip"] or token["rstrip"] or token["single_word"] for token in added)
    ambiguous = any(a != b and b.startswith(a) for a in contents for b in contents)
    if bent or ambiguous:
        return None
    return {content: first_rank + i for i, content in enumerate(contents)}


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
    bytes_of = _reader(tokenizer)
    found = [None if i in special else bytes_of(i) for i in range(tokenizer.vocab_size)]
    ids = [i for i in probe if i not in special]
    text = b"".join(found[i] or b"" for i in ids).decode(errors="replace")
    return found if text.strip() == _PROBE.strip() else None


def _reader(tokenizer: MegatronTokenizer) -> Callable[[int], bytes | None]:
    if isinstance(tokenizer, CustomTikTokenizer):
        return tokenizer.bytes_of
    names = tokenizer.inv_vocab
    table = _byte_level_table()
    is_byte_level = any("\u0120" in name for name in names.values())  # its sign for a space

    def bytes_of(index: int) -> bytes | None:
        name = names.get(index)
        if name is None:
            return None
        if is_byte_level:
            return bytes(map(table.__getitem__, name)) if table.keys() >= set(name) else None
        byte = _BYTE.fullmatch(name)
        return bytes.fromhex(byte[1]) if byte else name.replace(_SPACE, " ").encode()

    return bytes_of


def _byte_level_table() -> dict[str, int]:
    """Return the character -> byte of byte-level BPE: printable bytes stand for themselves."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    moved = {chr(256 + number): byte for number, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | moved
