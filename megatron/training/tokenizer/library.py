"""Tokenizers that use the ``tokenizers`` library: their base class, GPT2BPETokenizer, WordPiece."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Protocol

from megatron.core.config.errors import ConfigError
from megatron.core.optional import require
from megatron.training.tokenizer.base import (
    BpeRules,
    MegatronTokenizer,
    MissingToken,
    TokenBatch,
    pack,
)


class Encoding(Protocol):
    """Interface of `tokenizers.Encoding`: the tokens of a text."""

    ids: list[int]
    offsets: list[tuple[int, int]]


class Library(Protocol):
    """Interface of `tokenizers.Tokenizer`, as far as it is used."""

    def encode(self, sequence: str, *, add_special_tokens: bool = True) -> Encoding: ...
    def encode_batch_fast(
        self, input: list[str], *, add_special_tokens: bool = True
    ) -> list[Encoding]: ...
    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str: ...
    def get_vocab(self) -> dict[str, int]: ...
    def get_vocab_size(self) -> int: ...
    def token_to_id(self, token: str) -> int | None: ...
    def to_str(self) -> str: ...


class LibraryTokenizer(MegatronTokenizer):
    """Wrapper of a ``tokenizers.Tokenizer``; adds no tokens around a text."""

    special_tokens: Mapping[str, str]  # role -> token

    def __init__(
        self, library: Library, *tokenizer_paths: str, **tokenizer_options: object
    ) -> None:
        super().__init__(*tokenizer_paths, **tokenizer_options)
        self._library = library

    def tokenize(self, text: str) -> list[int]:
        return self._library.encode(text, add_special_tokens=False).ids

    def tokenize_batch(self, texts: Sequence[str]) -> TokenBatch:
        encoded = self._library.encode_batch_fast(list(texts), add_special_tokens=False)
        return pack([row.ids for row in encoded])

    def detokenize(self, ids: Sequence[int]) -> str:
        return self._library.decode(list(ids), skip_special_tokens=False)

    def offsets(self, ids: Sequence[int], text: str) -> list[int]:
        encoded = self._library.encode(text, add_special_tokens=False)
        if encoded.ids != list(ids):
            raise MissingToken(f"{self.name}: offsets are known for the ids of the whole text only")
        return [start for start, _ in encoded.offsets]

    def tokenize_with_ends(
        self, text: str, *, adds_special: bool = False
    ) -> tuple[list[int], list[int]]:
        encoded = self._library.encode(text, add_special_tokens=False)  # it has none
        return encoded.ids, [end for _, end in encoded.offsets]

    @cached_property
    def vocab(self) -> Mapping[str, int]:
        return self._library.get_vocab()

    @property
    def vocab_size(self) -> int:
        return self._library.get_vocab_size()

    def _special(self, role: str) -> int:
        token = self.special_tokens.get(role)
        if token is None:
            return super()._special(role)
        index = self._library.token_to_id(token)
        if index is None:
            raise MissingToken(
                f"{self.name}: the vocabulary has no {token!r}, which is its {role.upper()} token; "
                f"add {token!r} to the vocabulary"
            )
        return index


class _GPT2BPETokenizer(LibraryTokenizer):
    """GPT2BPETokenizer: byte-level BPE from ``vocab.json`` and ``merges.txt``.

    Special tokens in a text are tokenized as ordinary text; ``<|endoftext|>`` is EOD.
    """

    special_tokens = dict.fromkeys(("eod", "eos"), "<|endoftext|>")

    def __init__(self, vocab_file: str, merge_file: str) -> None:
        library = require("tokenizers", "--tokenizer-type GPT2BPETokenizer")
        try:
            model = library.models.BPE.from_file(vocab_file, merge_file)
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(
                f"--vocab-file {vocab_file} --merge-file {merge_file}: {error}; "
                "they must be a vocab.json and the merges.txt written with it"
            ) from error
        bpe = library.Tokenizer(model)
        bpe.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        bpe.decoder = library.decoders.ByteLevel()
        super().__init__(bpe, vocab_file, merge_file)

    def bpe_rules(self) -> BpeRules:
        return BpeRules(self._library.to_str())


_MAX_WORD_CHARACTERS = 200  # longer words are unknown, as in Google's BERT
_CONTINUES_WORD = "##"


class _BertWordPieceTokenizer(LibraryTokenizer):
    """WordPiece tokenizer for BERT and T5.

    ``[BOS]``, ``[EOS]`` and the ``<extra_id_N>`` of T5 get ids after those of the vocabulary file.
    Special tokens in a text are tokenized as ordinary text.
    """

    special_tokens: Mapping[str, str] = {
        **{role: f"[{role.upper()}]" for role in ("cls", "sep", "pad", "mask", "bos", "eos")},
        "eod": "[EOS]",
    }

    def __init__(self, vocab_file: str, lower_case: bool = True, vocab_extra_ids: int = 0) -> None:
        library = require("tokenizers", "--tokenizer-type BertWordPiece...")
        vocab = _read_vocab(vocab_file)
        for token in ("[BOS]", "[EOS]", *(f"<extra_id_{i}>" for i in range(vocab_extra_ids))):
            vocab.setdefault(token, len(vocab))
        wordpiece = library.Tokenizer(
            library.models.WordPiece(
                vocab, unk_token="[UNK]", max_input_chars_per_word=_MAX_WORD_CHARACTERS
            )
        )
        wordpiece.normalizer = library.normalizers.BertNormalizer(
            clean_text=True,
            handle_chinese_chars=True,
            strip_accents=lower_case,
            lowercase=lower_case,
        )
        wordpiece.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
        super().__init__(
            wordpiece, vocab_file, lower_case=lower_case, vocab_extra_ids=vocab_extra_ids
        )
        self.name = "BertWordPieceLowerCase" if lower_case else "BertWordPieceCase"
        self._num_extra_ids = vocab_extra_ids

    def detokenize(self, ids: Sequence[int]) -> str:
        return self.decode_token_ids(ids)

    decode = detokenize

    def decode_token_ids(self, token_ids: Sequence[int]) -> str:
        """Return words separated by single spaces, without ``[PAD]`` and ``[CLS]``."""
        tokens = [self.inv_vocab[index] for index in token_ids]
        kept = [token for token in tokens if token not in ("[PAD]", "[CLS]")]
        return " ".join(kept).replace(" " + _CONTINUES_WORD, "")

    @property
    def additional_special_tokens_ids(self) -> list[int]:
        """Ids of ``<extra_id_0>``, ``<extra_id_1>``, ..., which mark masked spans in T5."""
        return [self.vocab[f"<extra_id_{i}>"] for i in range(self._num_extra_ids)]


def _read_vocab(vocab_file: str) -> dict[str, int]:
    try:
        with open(vocab_file, encoding="utf-8") as file:
            tokens = [line.strip() for line in file]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--vocab-file {vocab_file}: {error}; it must be a vocab.txt with one token a line"
        ) from error
    if "[UNK]" not in tokens:
        raise ConfigError(f"--vocab-file {vocab_file} has no line [UNK]; it is no BERT vocabulary")
    vocab: dict[str, int] = {}
    for index, token in enumerate(tokens):
        if (first := vocab.setdefault(token, index)) != index:
            raise ConfigError(
                f"--vocab-file {vocab_file}: line {index + 1} repeats {token!r} of line "
                f"{first + 1}, and [BOS] would get the id of another token; put a token that no "
                "text has there, such as [unused0], which leaves all other ids as they are"
            )
    return vocab
