"""Interface of all tokenizers: text to ids and back, vocabulary, special ids, identity.

Reading a special id that the vocabulary lacks raises `MissingToken`, rather than returning a None
that fails later as an index.  `BpeRules` are the rules of a byte-level BPE in the form that faster
libraries load (see `fast`), `TokenizerSpec` the options from which a tokenizer is built.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from megatron.core.config.errors import ConfigError
from megatron.training.config.tokenizer import TokenizerConfig


@dataclass(frozen=True)
class BpeRules:
    """``tokenizer.json`` without post-processor, and the ids to add around each text."""

    tokenizer_json: str
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    added_tokens: tuple[str, ...] = ()  # matched in a text before it is split


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
        """Return byte-level BPE rules for a faster library; None if the tokenizer is no such."""
        return None

    def appended_tokens(self) -> Set[str]:
        """Return special tokens outside of the model: other text has the same ids without them."""
        return frozenset()

    def special_ids(self) -> Set[int]:
        """Return the ids of special tokens, whose texts a reader may want to leave out."""
        roles = {self.id_of(role) for role in ("bos", "eos", "eod", "pad")}
        return {index for index in roles if index is not None}

    @cached_property
    def inv_vocab(self) -> Mapping[int, str]:
        """Id -> token."""
        return {index: token for token, index in self.vocab.items()}

    @property
    def additional_special_tokens_ids(self) -> list[int] | None:
        """Ids of ``<extra_id_0>``, ``<extra_id_1>``, ..., which mark masked spans in T5."""
        return None

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


def surround(batch: TokenBatch, prefix: Sequence[int], suffix: Sequence[int]) -> TokenBatch:
    """Put ``prefix`` before and ``suffix`` after the ids of every text."""
    if not prefix and not suffix:
        return batch
    ends = batch.lengths.cumsum()
    bounds = np.stack([ends - batch.lengths, ends], 1)
    places = bounds.repeat([len(prefix), len(suffix)], 1).ravel()
    ids = np.insert(batch.ids, places, np.tile([*prefix, *suffix], len(ends)))
    return TokenBatch(ids, batch.lengths + len(prefix) + len(suffix))


@dataclass(frozen=True, kw_only=True)
class TokenizerSpec(TokenizerConfig):
    """Tokenizer options of the command line."""

    @classmethod
    def of(cls, source: object) -> TokenizerSpec:
        """Read the fields from a namespace or a config; missing fields and None get defaults."""
        given = vars(source)
        names = [f.name for f in dataclasses.fields(cls) if given.get(f.name) is not None]
        return cls(**{name: given[name] for name in names})

    def need(self, field: str) -> Any:
        """Return the value of ``field``.  Raises ConfigError if it is not set."""
        value = getattr(self, field)
        if value is None:
            flag = "--" + field.replace("_", "-")
            raise ConfigError(f"--tokenizer-type {self.tokenizer_type} needs {flag}; give {flag}")
        return value


_IMAGE_TOKEN = "<image>"
_IMAGE_TOKEN_ID = -200  # outside the vocabulary: the model inserts image features


class _NullTokenizer(MegatronTokenizer):
    """Tokenizer of ids 0 to ``vocab_size`` - 1; the id ``vocab_size`` is EOD."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(None, vocab_size=vocab_size)
        self._num_ids = int(vocab_size)

    def tokenize(self, text: str) -> list[int]:
        try:
            return [int(word) for word in text.split()]
        except ValueError as error:
            raise ConfigError(f"{self.name} reads ids in decimal: {error}") from error

    def detokenize(self, ids: Sequence[int]) -> str:
        return " ".join(str(index) for index in ids)

    def offsets(self, ids: Sequence[int], text: str) -> list[int]:
        starts = [0]
        for index in ids[:-1]:
            starts.append(starts[-1] + len(str(index)) + 1)
        return starts[: len(ids)]

    @property
    def vocab(self) -> Mapping[str, int]:
        return {str(index): index for index in range(self._num_ids)} | {"<eod>": self._num_ids}

    @property
    def vocab_size(self) -> int:
        return self._num_ids + 1

    def _special(self, role: str) -> int:
        return self._num_ids if role == "eod" else super()._special(role)


class _NullMultimodalTokenizer(_NullTokenizer):
    """NullTokenizer with a token that stands for an image."""

    def __init__(
        self, vocab_size: int, image_token: str | None = None, image_token_id: int | None = None
    ) -> None:
        super().__init__(vocab_size)
        self._image_token = _IMAGE_TOKEN if image_token is None else image_token
        self._image_token_id = _IMAGE_TOKEN_ID if image_token_id is None else image_token_id

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> int | list[int]:
        """Return the id of a word, or of each of several, including the image token."""
        if isinstance(tokens, str):
            is_image = tokens == self._image_token
            return self._image_token_id if is_image else self.tokenize(tokens)[0]
        return [self._image_token_id if t == self._image_token else int(t) for t in tokens]
