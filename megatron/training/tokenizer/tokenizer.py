"""Build a tokenizer from command-line options, and pad the size of its vocabulary.

``build_tokenizer`` has Megatron-LM's name and signature: it takes an argparse namespace.  The
application itself calls ``create_tokenizer`` and ``pad_vocab_size``.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable

from megatron.core.config.errors import ConfigError
from megatron.training.config.tokenizer import TOKENIZER_TYPES
from megatron.training.tokenizer.base import MegatronTokenizer as MegatronTokenizer
from megatron.training.tokenizer.base import TokenizerSpec
from megatron.training.tokenizer.base import _NullMultimodalTokenizer as _NullMultimodalTokenizer
from megatron.training.tokenizer.base import _NullTokenizer as _NullTokenizer
from megatron.training.tokenizer.huggingface import _HuggingFaceTokenizer as _HuggingFaceTokenizer
from megatron.training.tokenizer.library import (
    _BertWordPieceTokenizer as _BertWordPieceTokenizer,
)
from megatron.training.tokenizer.library import _GPT2BPETokenizer as _GPT2BPETokenizer
from megatron.training.tokenizer.multimodal_tokenizer import MultimodalTokenizer
from megatron.training.tokenizer.sentencepiece import (
    _GPTSentencePieceTokenizer as _GPTSentencePieceTokenizer,
)
from megatron.training.tokenizer.sentencepiece import _Llama2Tokenizer as _Llama2Tokenizer
from megatron.training.tokenizer.sentencepiece import (
    _SentencePieceTokenizer as _SentencePieceTokenizer,
)
from megatron.training.tokenizer.sft_tokenizer import SFTTokenizer
from megatron.training.tokenizer.tiktoken import CustomTikTokenizer as CustomTikTokenizer

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


def build_tokenizer(args: Namespace) -> MegatronTokenizer:
    """Build the tokenizer that ``args`` names and set ``args.padded_vocab_size`` if it is None."""
    values = vars(args)
    if values.get("rank", 0) == 0:
        print(f"> building {args.tokenizer_type} tokenizer ...", flush=True)
    tokenizer = create_tokenizer(TokenizerSpec.of(args))
    if values.get("padded_vocab_size") is None:
        values["padded_vocab_size"] = _vocab_size_with_padding(tokenizer.vocab_size, args)
    return tokenizer


def _vocab_size_with_padding(
    orig_vocab_size: int, args: Namespace, logging_enabled: bool = True
) -> int:
    """Return the vocabulary size padded for tensor parallelism; rank 0 prints it."""
    padded = pad_vocab_size(
        orig_vocab_size, args.make_vocab_size_divisible_by, args.tensor_model_parallel_size
    )
    if logging_enabled and vars(args).get("rank", 0) == 0:
        print(padding_message(orig_vocab_size, padded), flush=True)
    return padded
