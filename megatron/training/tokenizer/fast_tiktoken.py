"""Byte-level BPE with ``tiktoken``, for rules whose merges it reproduces.

``tiktoken`` merges the neighbours whose joined bytes have the lowest rank; the rules merge the pair
that comes first in a list.  The two agree if the list makes each token once, in order of rank, and
every token's own bytes merge back into it.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from megatron.core.config.value_types import JsonObject
from megatron.core.optional import require
from megatron.training.tokenizer.base import (
    MegatronTokenizer,
    TokenBatch,
    pack,
    replace_rows,
    surround,
)
from megatron.training.tokenizer.bpe_rules import BpeRules, byte_of_character

logger = logging.getLogger(__name__)

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
        """Return the ranks of a text, recognising its special tokens."""

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
