"""Train a tokenizer on the text of input files."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron.core.config.errors import ConfigError
from megatron.core.optional import require
from megatron.training.preprocess.documents import RecordFormat, flatten, read_documents

END_OF_TEXT = "<|endoftext|>"
OF_BERT = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """Options of tokenizer training: input, its amount, vocabulary, output."""

    input: str
    output_dir: str
    record_format: RecordFormat
    vocab_size: int
    special_tokens: Sequence[str] = (END_OF_TEXT,)
    min_frequency: int = 2
    max_bytes: int | None = None  # of text; None: all

    def __post_init__(self) -> None:
        if self.vocab_size <= 256 + len(self.special_tokens):
            raise ConfigError(
                f"--vocab-size {self.vocab_size} must be larger than the 256 bytes and the "
                f"{len(self.special_tokens)} special tokens"
            )


def train_bpe(options: TrainingOptions) -> list[str]:
    """Train byte-level BPE; return the paths of vocab.json, merges.txt and tokenizer.json."""
    library = require("tokenizers", "--model-type bpe")
    bpe = library.Tokenizer(library.models.BPE())
    bpe.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = library.decoders.ByteLevel()
    alphabet = sorted(library.pre_tokenizers.ByteLevel.alphabet())
    _train(bpe, options, library.trainers.BpeTrainer, initial_alphabet=alphabet)
    tokenizer_json = os.path.join(options.output_dir, "tokenizer.json")
    bpe.save(tokenizer_json)
    return [*bpe.model.save(options.output_dir), tokenizer_json]


def train_wordpiece(options: TrainingOptions, *, lower_case: bool) -> list[str]:
    """Train WordPiece, with BERT's special tokens first; return the path of vocab.txt."""
    library = require("tokenizers", "--model-type wordpiece")
    wordpiece = library.Tokenizer(library.models.WordPiece(unk_token="[UNK]"))
    wordpiece.normalizer = library.normalizers.BertNormalizer(lowercase=lower_case)
    wordpiece.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
    options = replace(options, special_tokens=[*OF_BERT, *options.special_tokens])
    _train(wordpiece, options, library.trainers.WordPieceTrainer)
    pieces = wordpiece.get_vocab()
    vocab_txt = os.path.join(options.output_dir, "vocab.txt")
    with open(vocab_txt, "w", encoding="utf-8") as file:
        file.writelines(piece + "\n" for piece in sorted(pieces, key=pieces.__getitem__))
    return [vocab_txt]


def _train(tokenizer: Any, options: TrainingOptions, trainer_class: Any, **more: Any) -> None:
    trainer = trainer_class(
        vocab_size=options.vocab_size,
        min_frequency=options.min_frequency,
        special_tokens=list(options.special_tokens),
        show_progress=False,
        **more,
    )
    tokenizer.train_from_iterator(texts_of(options), trainer)
    os.makedirs(options.output_dir, exist_ok=True)


def train_sentencepiece(options: TrainingOptions, model_type: str) -> list[str]:
    """Train a SentencePiece model of ``model_type`` bpe or unigram; return its paths."""
    library = require("sentencepiece", "--model-type sentencepiece")
    os.makedirs(options.output_dir, exist_ok=True)
    prefix = os.path.join(options.output_dir, "tokenizer")
    try:
        library.SentencePieceTrainer.train(
            sentence_iterator=_lines(options),
            model_prefix=prefix,
            model_type=model_type,
            vocab_size=options.vocab_size,
            user_defined_symbols=list(options.special_tokens),
            byte_fallback=True,
            character_coverage=0.9995,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            max_sentence_length=1 << 20,
            num_threads=os.cpu_count() or 1,
            minloglevel=2,
        )
    except RuntimeError as error:
        reason = str(error).splitlines()[-1]
        raise ConfigError(
            f"--vocab-size {options.vocab_size}: sentencepiece says {reason!r}; "
            "give more text or another size"
        ) from error
    return [prefix + ".model", prefix + ".vocab"]


def texts_of(options: TrainingOptions) -> Iterator[str]:
    """Yield every text of the input, up to ``max_bytes``."""
    left = options.max_bytes
    for block, found in read_documents(options.input, options.record_format):
        for documents in found.values():
            yield from flatten(documents)[0]
        left = None if left is None else left - (block.end - block.start)
        if left is not None and left <= 0:
            return


def _lines(options: TrainingOptions) -> Iterator[str]:
    """Yield lines: SentencePiece refuses long texts, and its pieces cannot hold a newline."""
    for text in texts_of(options):
        yield from (line for line in text.split("\n") if line)
