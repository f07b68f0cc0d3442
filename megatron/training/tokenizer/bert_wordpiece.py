"""BertWordPieceLowerCase and BertWordPieceCase: WordPiece from a ``vocab.txt``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron.core.config.errors import ConfigError
from megatron.core.optional import require
from megatron.training.tokenizer.library import LibraryTokenizer

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
