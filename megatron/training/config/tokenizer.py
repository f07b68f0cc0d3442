"""Text to ids."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config.option import option


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """Text to ids."""

    vocab_size: int | None = option(None, "", group="tokenizer")
    padded_vocab_size: int | None = option(None, "", group="tokenizer")
    vocab_file: str | None = option(None, "", group="tokenizer")
    merge_file: str | None = option(None, "", group="tokenizer")
    vocab_extra_ids: int = option(0, "", group="tokenizer")
    tokenizer_type: str | None = option(
        None,
        "",
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
    )
    tokenizer_model: str | None = option(None, "", group="tokenizer")
    tiktoken_pattern: str | None = option(None, "", group="tokenizer")
    tiktoken_num_special_tokens: int = option(1000, "", group="tokenizer")
    tiktoken_special_tokens: tuple[str, ...] | None = option(None, "", group="tokenizer", nargs="+")
