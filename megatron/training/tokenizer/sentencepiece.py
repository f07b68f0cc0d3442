"""Tokenizers that use the ``sentencepiece`` library: three uses of one model file."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import groupby

from megatron.core.config.errors import ConfigError
from megatron.core.optional import require
from megatron.training.tokenizer.base import (
    MegatronTokenizer,
    MissingToken,
    TokenBatch,
    pack,
    surround,
)


class _PieceTokenizer(MegatronTokenizer):
    """Unchanged SentencePiece model: ids are pieces, EOD is its end-of-sequence piece."""

    def __init__(self, model_file: str, vocab_extra_ids: int = 0) -> None:
        super().__init__(model_file, vocab_extra_ids=vocab_extra_ids)
        library = require("sentencepiece", f"--tokenizer-type {self.name}")
        try:
            self._pieces = library.SentencePieceProcessor(model_file=model_file)
        except (OSError, RuntimeError, TypeError) as error:
            raise ConfigError(
                f"--tokenizer-model {model_file}: {error}; it must be a SentencePiece model"
            ) from error
        model = self._pieces
        self._control = {"pad": model.pad_id(), "bos": model.bos_id(), "eos": model.eos_id()}

    def tokenize(self, text: str) -> list[int]:
        ids: list[int] = self._pieces.encode(text)
        return ids

    def tokenize_batch(self, texts: Sequence[str]) -> TokenBatch:
        return pack(self._pieces.encode(list(texts), num_threads=1))

    def detokenize(self, ids: Sequence[int]) -> str:
        text: str = self._pieces.decode([int(index) for index in ids])
        return text

    def offsets(self, ids: Sequence[int], text: str) -> list[int]:
        encoded = self._pieces.encode_as_proto(text)
        if [piece.id for piece in encoded.pieces] != list(ids):
            raise MissingToken(f"{self.name}: offsets are known for the ids of the whole text only")
        return [piece.begin for piece in encoded.pieces]

    @cached_property
    def vocab(self) -> Mapping[str, int]:
        return {self._pieces.id_to_piece(i): i for i in range(self._pieces.get_piece_size())}

    @property
    def vocab_size(self) -> int:
        return int(self._pieces.get_piece_size())

    def _special(self, role: str) -> int:
        named = "eos" if role == "eod" else role
        index = self._control.get(named, -1)
        return super()._special(role) if index < 0 else index


class _GPTSentencePieceTokenizer(_PieceTokenizer):
    """GPTSentencePieceTokenizer: the unchanged model."""


class _Llama2Tokenizer(_PieceTokenizer):
    """Llama2Tokenizer: adds BOS before a text."""

    def tokenize(self, text: str, bos: bool = True, eos: bool = False) -> list[int]:
        return [self.bos] * bos + super().tokenize(text) + [self.eos] * eos

    def tokenize_plain(self, text: str) -> list[int]:
        return self.tokenize(text, bos=False)

    def tokenize_batch(self, texts: Sequence[str]) -> TokenBatch:
        return surround(super().tokenize_batch(texts), [self.bos], [])


class _SentencePieceTokenizer(_PieceTokenizer):
    """SentencePieceTokenizer: the model's pieces and the special tokens of BERT and T5.

    ``<CLS> <SEP> <EOD> <MASK>``, ``<PAD> <BOS> <EOS>`` unless the model has such tokens, and
    ``<extra_id_N>`` get ids after the pieces.  They are recognized in a text.
    """

    def __init__(self, model_file: str, vocab_extra_ids: int = 0) -> None:
        super().__init__(model_file, vocab_extra_ids)
        self._names = {role: f"<{role.upper()}>" for role in ("cls", "sep", "eod", "mask")}
        self._names |= {
            role: self._pieces.id_to_piece(index) if index >= 0 else f"<{role.upper()}>"
            for role, index in self._control.items()
        }
        self._extra = [f"<extra_id_{i}>" for i in range(vocab_extra_ids)]
        vocab = dict(super().vocab)
        for token in (*self._names.values(), *self._extra):
            vocab.setdefault(token, len(vocab))
        self._vocab = vocab
        special = sorted((*self._names.values(), *self._extra), key=len, reverse=True)
        self._special_ids = frozenset(vocab[token] for token in special)
        self._split = re.compile("(" + "|".join(map(re.escape, special)) + ")")

    def tokenize(self, text: str) -> list[int]:
        ids: list[int] = []
        for index, part in enumerate(self._split.split(text)):
            if index % 2:
                ids.append(self._vocab[part])
            elif part:
                ids += self._pieces.encode(part)
        return ids

    def tokenize_batch(self, texts: Sequence[str]) -> TokenBatch:
        rows = self._pieces.encode(list(texts), num_threads=1)
        for i, text in enumerate(texts):
            if self._split.search(text):
                rows[i] = self.tokenize(text)
        return pack(rows)

    def detokenize(self, ids: Sequence[int]) -> str:
        parts: list[str] = []
        for are_special, run in groupby(map(int, ids), self._special_ids.__contains__):
            if are_special:
                parts += map(self.inv_vocab.__getitem__, run)
            else:
                parts.append(self._pieces.decode(list(run)))
        return " ".join(parts)

    def offsets(self, ids: Sequence[int], text: str) -> list[int]:
        if self._split.search(text):
            raise MissingToken(f"{self.name} keeps no offsets in a text with special tokens")
        return super().offsets(ids, text)

    @property
    def vocab(self) -> Mapping[str, int]:
        return self._vocab

    @property
    def vocab_size(self) -> int:
        return len(self._vocab)

    def _special(self, role: str) -> int:
        return self._vocab[self._names[role]]

    @property
    def additional_special_tokens_ids(self) -> list[int]:
        return [self._vocab[token] for token in self._extra]
