"""Interface of all tokenizers: text to ids and back, vocabulary, special ids, identity.

Reading a special id that the vocabulary lacks raises `MissingToken`, rather than returning a None
that fails later as an index.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping, Sequence, Set
from functools import cached_property
from typing import NamedTuple

import numpy as np

from megatron.core.config.errors import ConfigError
from megatron.training.tokenizer.bpe_rules import BpeRules


class MissingToken(ConfigError, AttributeError):
    """A special token that the vocabulary lacks; an AttributeError, so that hasattr works."""


class TokenBatch(NamedTuple):
    """Concatenated ids of many texts, and the number of ids of each text."""

    ids: np.ndarray  # int32 [sum(lengths)]
    lengths: np.ndarray  # int64 [texts]


class _Special:
    """Descriptor of a special token's id, as an attribute of a tokenizer."""

    def __init__(self, role: str) -> None:
        self._role = role

    def __get__(self, tokenizer: MegatronTokenizer, owner: type[MegatronTokenizer]) -> int:
        return tokenizer._special(self._role)


class MegatronTokenizer(ABC):
    """Base class of all tokenizers.

    ``tokenizer_paths`` and ``tokenizer_options`` identify the tokenizer in the names of index
    caches.  Their values and their order are part of a file format.
    """

    def __init__(self, *tokenizer_paths: str | None, **tokenizer_options: object) -> None:
        self.unique_identifiers: OrderedDict[str, object] = OrderedDict()
        self.unique_identifiers["class"] = type(self).__name__
        self.unique_identifiers["tokenizer_path"] = list(tokenizer_paths)
        for name, value in tokenizer_options.items():
            self.unique_identifiers[name] = str(value)
        self.name = type(self).__name__.lstrip("_")

    @abstractmethod
    def tokenize(self, text: str) -> list[int]:
        """Return the ids of ``text``."""

    @abstractmethod
    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``, including special tokens."""

    @property
    @abstractmethod
    def vocab(self) -> Mapping[str, int]:
        """Token -> id."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of ids, without padding."""

    def tokenize_plain(self, text: str) -> list[int]:
        """Return the ids of ``text`` without special tokens that ``tokenize`` adds around it."""
        return self.tokenize(text)

    def tokenize_batch(self, texts: Sequence[str]) -> TokenBatch:
        """Tokenize many texts; the ids of each equal those of ``tokenize``."""
        return pack([self.tokenize(text) for text in texts])

    def offsets(self, ids: Sequence[int], text: str) -> list[int]:
        """Return the index in ``text`` of the character at which each of ``ids`` starts."""
        raise MissingToken(f"{self.name} keeps no offsets of its tokens into the text")

    def tokenize_with_ends(
        self, text: str, *, adds_special: bool = False
    ) -> tuple[list[int], list[int]]:
        """Return the ids of ``text``, and the index after the last character of each.

        Tokens that the tokenizer puts around a text are included with ``adds_special``; they end
        at 0.  Raises MissingToken if the tokenizer keeps no offsets.
        """
        raise MissingToken(f"{self.name} keeps no offsets of its tokens into the text")

    def bpe_rules(self) -> BpeRules | None:
        """Return byte-level BPE rules for a faster library; None if it cannot be used."""
        return None

    def appended_tokens(self) -> Set[str]:
        """Return special tokens outside of the model: other text has the same ids without them."""
        return frozenset()

    @cached_property
    def inv_vocab(self) -> Mapping[int, str]:
        """Id -> token."""
        return {index: token for token, index in self.vocab.items()}

    def id_of(self, role: str) -> int | None:
        """Return the id of ``eod``, ``bos``, ...; None if the vocabulary has no such token."""
        try:
            return int(getattr(self, role))
        except MissingToken:
            return None

    def _special(self, role: str) -> int:
        """Return the id of ``eod``, ``bos``, ...; subclasses implement it for their tokens."""
        raise self._missing(role.upper())

    eod = _Special("eod")  # ends a document
    bos = _Special("bos")  # begins a sequence
    eos = _Special("eos")
    pad = _Special("pad")
    cls = _Special("cls")  # before a BERT sample
    sep = _Special("sep")  # between its parts
    mask = _Special("mask")

    # Names of NeMo, which users' scripts call.
    eos_id = eos
    bos_id = bos
    pad_id = pad

    def _missing(self, role: str) -> MissingToken:
        return MissingToken(
            f"{self.name}: this vocabulary has no {role} token; add one to the tokenizer's files, "
            "or leave out the option that needs it"
        )


def pack(rows: Sequence[Sequence[int] | np.ndarray]) -> TokenBatch:
    """Join lists of ids into one batch."""
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    ids = np.empty(int(lengths.sum()), np.int32)
    at = 0
    for row in rows:
        ids[at : at + len(row)] = row
        at += len(row)
    return TokenBatch(ids, lengths)


def replace_rows(batch: TokenBatch, rows: Mapping[int, Sequence[int] | np.ndarray]) -> TokenBatch:
    """Replace the ids of some texts in a batch; ``rows`` maps index of text -> ids."""
    if not rows:
        return batch
    ends = batch.lengths.cumsum()
    kept = [batch.ids[end - n : end] for end, n in zip(ends, batch.lengths, strict=True)]
    return pack([rows.get(index, row) for index, row in enumerate(kept)])


def surround(batch: TokenBatch, prefix: Sequence[int], suffix: Sequence[int]) -> TokenBatch:
    """Put ``prefix`` before and ``suffix`` after the ids of every text."""
    if not prefix and not suffix:
        return batch
    lengths = batch.lengths + (len(prefix) + len(suffix))
    ends = np.cumsum(lengths)
    ids = np.empty(int(lengths.sum()), np.int32)
    is_text = np.ones(len(ids), bool)
    added = [(ends - lengths + i, token) for i, token in enumerate(prefix)]
    added += [(ends - len(suffix) + i, token) for i, token in enumerate(suffix)]
    for at, token in added:
        ids[at] = token
        is_text[at] = False
    ids[is_text] = batch.ids
    return TokenBatch(ids, lengths)
