"""Tokenizers that use the ``tokenizers`` library: their base class, GPT2BPETokenizer, WordPiece."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from megatron.core.config.errors import ConfigError
from megatron.core.optional import require
from megatron.training.tokenizer.base import (
    BpeRules,
    MegatronTokenizer,
    MissingToken,
    TokenBatch,
    pack,
)


class LibraryTokenizer(MegatronTokenizer):
    """Wrapper of a ``tokenizers.Tokenizer``, or of None if a subclass has tokens without offsets.

    ``options`` of its methods are those of ``encode`` and ``decode`` of the library.
    """

    special_tokens: Mapping[str, str]  # role -> token

    def __init__(self, library: Any, *tokenizer_paths: str, **tokenizer_options: object) -> None:
        super().__init__(*tokenizer_paths, **tokenizer_options)
        self._library = library

    def tokenize(self, text: str, **options: Any) -> list[int]:
        ids: list[int] = self._library.encode(text, **options).ids
        return ids

    def tokenize_batch(self, texts: Sequence[str]) -> TokenBatch:
        if self._library is None:
            return super().tokenize_batch(texts)
        return pack([row.ids for row in self._library.encode_batch_fast(list(texts))])

    def detokenize(self, ids: Sequence[int], **options: Any) -> str:
        text: str = self._library.decode(list(ids), **{"skip_special_tokens": False, **options})
        return text

    def offsets(self, ids: Sequence[int], text: str) -> list[int]:
        if self._library is None:
            return super().offsets(ids, text)
        encoded = self._library.encode(text)
        if encoded.ids != list(ids):
            raise MissingToken(f"{self.name}: offsets are known for the ids of the whole text only")
        return [start for start, _ in encoded.offsets]

    def tokenize_with_ends(
        self, text: str, *, adds_special: bool = False
    ) -> tuple[list[int], list[int]]:
        if self._library is None:
            return super().tokenize_with_ends(text, adds_special=adds_special)
        encoded = self._library.encode(text, add_special_tokens=adds_special)
        return encoded.ids, [end for _, end in encoded.offsets]

    @cached_property
    def vocab(self) -> Mapping[str, int]:
        found: Mapping[str, int] = self._library.get_vocab()
        return found

    @property
    def vocab_size(self) -> int:
        size: int = self._library.get_vocab_size()
        return size

    def _special(self, role: str) -> int:
        token = self.special_tokens.get(role)
        if token is None:
            return super()._special(role)
        index: int | None = self._library.token_to_id(token)
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
        # Longer words are unknown, as in Google's BERT.
        model = library.models.WordPiece(vocab, unk_token="[UNK]", max_input_chars_per_word=200)
        wordpiece = library.Tokenizer(model)
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

    def detokenize(self, ids: Sequence[int], **_options: Any) -> str:
        """Return words separated by single spaces, without ``[PAD]`` and ``[CLS]``."""
        tokens = [self.inv_vocab[index] for index in ids]
        kept = [token for token in tokens if token not in ("[PAD]", "[CLS]")]
        return " ".join(kept).replace(" ##", "")

    decode = decode_token_ids = detokenize

    @property
    def additional_special_tokens_ids(self) -> list[int]:
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
