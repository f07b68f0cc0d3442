"""Build a tokenizer from command-line options, and pad the size of its vocabulary."""

from __future__ import annotations

from collections.abc import Callable

from megatron.core.config.errors import ConfigError
from megatron.training.config.tokenizer import TOKENIZER_TYPES
from megatron.training.tokenizer.base import MegatronTokenizer
from megatron.training.tokenizer.bert_wordpiece import _BertWordPieceTokenizer
from megatron.training.tokenizer.huggingface import _HuggingFaceTokenizer
from megatron.training.tokenizer.library import _GPT2BPETokenizer
from megatron.training.tokenizer.multimodal_tokenizer import MultimodalTokenizer
from megatron.training.tokenizer.null import _NullMultimodalTokenizer, _NullTokenizer
from megatron.training.tokenizer.sentencepiece import (
    _GPTSentencePieceTokenizer,
    _Llama2Tokenizer,
    _SentencePieceTokenizer,
)
from megatron.training.tokenizer.sft_tokenizer import SFTTokenizer
from megatron.training.tokenizer.spec import TokenizerSpec
from megatron.training.tokenizer.tiktoken import CustomTikTokenizer

BuildTokenizer = Callable[[TokenizerSpec], MegatronTokenizer]
# --tokenizer-type -> constructor, without the types that user code registers.
TOKENIZERS: dict[str, BuildTokenizer] = {
    "BertWordPieceLowerCase": lambda spec: _BertWordPieceTokenizer(
        spec.need("vocab_file"), True, spec.vocab_extra_ids
    ),
    "BertWordPieceCase": lambda spec: _BertWordPieceTokenizer(
        spec.need("vocab_file"), False, spec.vocab_extra_ids
    ),
    "GPT2BPETokenizer": lambda spec: _GPT2BPETokenizer(
        spec.need("vocab_file"), spec.need("merge_file")
    ),
    "SentencePieceTokenizer": lambda spec: _SentencePieceTokenizer(
        spec.need("tokenizer_model"), spec.vocab_extra_ids
    ),
    "GPTSentencePieceTokenizer": lambda spec: _GPTSentencePieceTokenizer(
        spec.need("tokenizer_model")
    ),
    "HuggingFaceTokenizer": lambda spec: _HuggingFaceTokenizer(
        spec.need("tokenizer_model"), spec.vocab_extra_ids
    ),
    "Llama2Tokenizer": lambda spec: _Llama2Tokenizer(spec.need("tokenizer_model")),
    "TikTokenizer": CustomTikTokenizer.build,
    "MultimodalTokenizer": MultimodalTokenizer.build,
    "SFTTokenizer": SFTTokenizer.build,
    "NullTokenizer": lambda spec: _NullTokenizer(spec.need("vocab_size")),
    "NullMultimodalTokenizer": lambda spec: _NullMultimodalTokenizer(spec.need("vocab_size")),
}


def register_tokenizer(name: str, build: BuildTokenizer) -> None:
    """Add a tokenizer for --tokenizer-type ``name``.  Raises ConfigError for a name that is taken.

    ``build`` gets the tokenizer flags; ``spec.need("vocab_file")`` requires one of them.
    """
    if not callable(build):
        raise ConfigError(f"register_tokenizer({name!r}, ...): {build!r} is no function")
    TOKENIZER_TYPES.register(name, build)


def create_tokenizer(spec: TokenizerSpec) -> MegatronTokenizer:
    """Build the tokenizer of ``spec``.  Raises ConfigError for missing or wrong options."""
    kind = spec.tokenizer_type
    if kind is None or kind not in TOKENIZER_TYPES:
        found = "is missing" if kind is None else f"{kind} is unknown"
        names = ", ".join(TOKENIZER_TYPES)
        raise ConfigError(
            f"--tokenizer-type {found}; give one of {names}, or --import-module with the module "
            "that registers it"
        )
    if kind in TOKENIZERS:
        return TOKENIZERS[kind](spec)
    build = TOKENIZER_TYPES[kind]
    tokenizer = build(spec) if callable(build) else build
    if not isinstance(tokenizer, MegatronTokenizer):
        raise ConfigError(
            f"--tokenizer-type {kind}: its function returns {tokenizer!r}, which is no "
            "MegatronTokenizer; derive the class from megatron.training.tokenizer.MegatronTokenizer"
        )
    return tokenizer


def pad_vocab_size(
    vocab_size: int, make_vocab_size_divisible_by: int, tensor_model_parallel_size: int
) -> int:
    """Round ``vocab_size`` up so that it divides evenly among tensor-parallel ranks.

    Each rank's share is a multiple of ``make_vocab_size_divisible_by``.
    """
    multiple = make_vocab_size_divisible_by * tensor_model_parallel_size
    return -(-vocab_size // multiple) * multiple


def padding_message(vocab_size: int, padded: int) -> str:
    """Return the line about padding that rank 0 prints."""
    return (
        f" > padded vocab (size: {vocab_size}) with {padded - vocab_size} dummy tokens "
        f"(new size: {padded})"
    )
