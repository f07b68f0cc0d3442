"""What every tokenizer offers: text to ids and back, its vocabulary, its special ids, its identity.

A special id that a vocabulary does not have is an error that says so when it is asked for, never
a None that surfaces later as an index.
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
    """The vocabulary has no such special token; also an AttributeError, so that hasattr works."""


class TokenBatch(NamedTuple):
    """The ids of many texts in a row, and how many belong to each text."""

    ids: np.ndarray  # int32 [sum(lengths)]
    lengths: np.ndarray  # int64 [texts]


class _Special:
    """The id of a special token, as an attribute of a tokenizer."""

    def __init__(self, role: str) -> None:
        self._role = role

    def __get__(self, tokenizer: MegatronTokenizer, owner: type[MegatronTokenizer]) -> int:
        return tokenizer._special(self._role)


class MegatronTokenizer(ABC):
    """Base of all tokenizers.

    ``tokenizer_paths`` and ``tokenizer_options`` identify the tokenizer in the names of index
    caches: both are part of a file format, order included.
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
        """The ids of ``text``."""

    @abstractmethod
    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of ``ids``, special tokens included."""

    @property
    @abstractmethod
    def vocab(self) -> Mapping[str, int]:
        """Token to id."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of ids, before any padding."""

    def tokenize_batch(self, texts: Sequence[str]) -> TokenBatch:
        """The ids of many texts at once; text by text equal to ``tokenize``."""
        return pack([self.tokenize(text) for text in texts])

    def offsets(self, ids: Sequence[int], text: str) -> list[int]:
        """The character of ``text`` at which each of ``ids`` starts."""
        raise MissingToken(f"{self.name} keeps no offsets of its tokens into the text")

    def bpe_rules(self) -> BpeRules | None:
        """What a faster library needs to give the same ids; None where there is none."""
        return None

    def appended_tokens(self) -> Set[str]:
        """Special tokens that stand outside the model: without them other text has the same ids."""
        return frozenset()

    @cached_property
    def inv_vocab(self) -> Mapping[int, str]:
        """Id to token."""
        return {index: token for token, index in self.vocab.items()}

    def id_of(self, role: str) -> int | None:
        """The id of ``eod``, ``bos``, ...; None where the vocabulary has no such token."""
        try:
            return int(getattr(self, role))
        except MissingToken:
            return None

    def _special(self, role: str) -> int:
        """The id of ``eod``, ``bos``, ...: what a kind of tokenizer says for all of them."""
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
    """The batch with the ids of some texts exchanged."""
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
