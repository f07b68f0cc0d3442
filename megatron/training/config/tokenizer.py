"""Text to ids."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config import states
from megatron.core.config.option import option


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """Text to ids."""

    vocab_size: int | None = option(
        None,
        "Tokens of the vocabulary before padding; of the tokenizer if not given.",
        group="tokenizer",
    )
    padded_vocab_size: int | None = option(
        None,
        "Vocabulary size after padding, instead of the computed one.",
        group="tokenizer",
    )
    vocab_file: str | None = option(
        None,
        "Vocabulary file of the tokenizer.",
        group="tokenizer",
    )
    merge_file: str | None = option(
        None,
        "Merge file of a byte-pair tokenizer.",
        group="tokenizer",
    )
    vocab_extra_ids: int = option(
        0,
        "Extra tokens at the end of the vocabulary.",
        group="tokenizer",
    )
    tokenizer_type: str | None = option(
        None,
        "Kind of tokenizer.",
        group="tokenizer",
        choices=(
            "BertWordPieceLowerCase",
            "BertWordPieceCase",
            "GPT2BPETokenizer",
            "SentencePieceTokenizer",
            "GPTSentencePieceTokenizer",
            "HuggingFaceTokenizer",
            "Llama2Tokenizer",
            "TikTokenizer",
            "MultimodalTokenizer",
            "NullTokenizer",
            "NullMultimodalTokenizer",
            "SFTTokenizer",
        ),
        refused_values={
            "MultimodalTokenizer": states.MULTIMODAL,
            "SFTTokenizer": states.SFT,
        },
    )
    tokenizer_model: str | None = option(
        None,
        "File, directory or Hugging Face name of the tokenizer.",
        group="tokenizer",
    )
    tiktoken_pattern: str | None = option(
        None,
        "Which pre-tokenisation pattern a tiktoken vocabulary has: v1 or v2.",
        group="tokenizer",
    )
    tiktoken_num_special_tokens: int = option(
        1000,
        "Ids reserved for special tokens in a tiktoken vocabulary.",
        group="tokenizer",
    )
    tiktoken_special_tokens: tuple[str, ...] | None = option(
        None,
        "Names of a tiktoken vocabulary's first special tokens.",
        group="tokenizer",
        nargs="+",
    )
