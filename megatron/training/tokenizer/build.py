"""From the command line's options to a tokenizer, and from its size to the model's."""

from __future__ import annotations

from collections.abc import Callable

from megatron.core.config.errors import ConfigError
from megatron.training.tokenizer.base import MegatronTokenizer
from megatron.training.tokenizer.bert_wordpiece import _BertWordPieceTokenizer
from megatron.training.tokenizer.huggingface import _HuggingFaceTokenizer
from megatron.training.tokenizer.library import _GPT2BPETokenizer
from megatron.training.tokenizer.null import _NullMultimodalTokenizer, _NullTokenizer
from megatron.training.tokenizer.sentencepiece import (
    _GPTSentencePieceTokenizer,
    _Llama2Tokenizer,
    _SentencePieceTokenizer,
)
from megatron.training.tokenizer.spec import TokenizerSpec
from megatron.training.tokenizer.tiktoken import CustomTikTokenizer

# --tokenizer-type -> what builds it.  A new kind is one file and one line here.
TOKENIZERS: dict[str, Callable[[TokenizerSpec], MegatronTokenizer]] = {
    "BertWordPieceLowerCase": _BertWordPieceTokenizer.build_lower_case,
    "BertWordPieceCase": _BertWordPieceTokenizer.build_case,
    "GPT2BPETokenizer": _GPT2BPETokenizer.build,
    "SentencePieceTokenizer": _SentencePieceTokenizer.build,
    "GPTSentencePieceTokenizer": _GPTSentencePieceTokenizer.build,
    "HuggingFaceTokenizer": _HuggingFaceTokenizer.build,
    "Llama2Tokenizer": _Llama2Tokenizer.build,
    "TikTokenizer": CustomTikTokenizer.build,
    "NullTokenizer": _NullTokenizer.build,
    "NullMultimodalTokenizer": _NullMultimodalTokenizer.build,
}
REFUSED = {
    "MultimodalTokenizer": "images inside text come with the vision-language models",
    "SFTTokenizer": "chat templates come with supervised fine-tuning",
}


def create_tokenizer(spec: TokenizerSpec) -> MegatronTokenizer:
    """Build what ``spec`` asks for; ConfigError says what is missing or wrong."""
    kind = spec.tokenizer_type
    if kind in REFUSED:
        raise ConfigError(
            f"--tokenizer-type {kind} is not available: {REFUSED[kind]}; "
            "use one of " + ", ".join(TOKENIZERS)
        )
    if kind not in TOKENIZERS:
        found = "is missing" if kind is None else f"{kind} is unknown"
        raise ConfigError(f"--tokenizer-type {found}; give one of " + ", ".join(TOKENIZERS))
    return TOKENIZERS[kind](spec)


def pad_vocab_size(
    vocab_size: int, make_vocab_size_divisible_by: int, tensor_model_parallel_size: int
) -> int:
    """``vocab_size`` rounded up so that every tensor-parallel rank has an equal, round share."""
    multiple = make_vocab_size_divisible_by * tensor_model_parallel_size
    return -(-vocab_size // multiple) * multiple


def padding_message(vocab_size: int, padded: int) -> str:
    """The line that rank 0 prints."""
    return (
        f" > padded vocab (size: {vocab_size}) with {padded - vocab_size} dummy tokens "
        f"(new size: {padded})"
    )
