"""Functions with Megatron-LM's names and signatures, for scripts written for it.

They take an argparse namespace; the application itself calls ``create_tokenizer`` and
``pad_vocab_size``.
"""

from __future__ import annotations

from argparse import Namespace

from megatron.training.tokenizer.base import MegatronTokenizer as MegatronTokenizer
from megatron.training.tokenizer.bert_wordpiece import (
    _BertWordPieceTokenizer as _BertWordPieceTokenizer,
)
from megatron.training.tokenizer.build import create_tokenizer, pad_vocab_size, padding_message
from megatron.training.tokenizer.huggingface import _HuggingFaceTokenizer as _HuggingFaceTokenizer
from megatron.training.tokenizer.library import _GPT2BPETokenizer as _GPT2BPETokenizer
from megatron.training.tokenizer.null import _NullMultimodalTokenizer as _NullMultimodalTokenizer
from megatron.training.tokenizer.null import _NullTokenizer as _NullTokenizer
from megatron.training.tokenizer.sentencepiece import (
    _GPTSentencePieceTokenizer as _GPTSentencePieceTokenizer,
)
from megatron.training.tokenizer.sentencepiece import _Llama2Tokenizer as _Llama2Tokenizer
from megatron.training.tokenizer.sentencepiece import (
    _SentencePieceTokenizer as _SentencePieceTokenizer,
)
from megatron.training.tokenizer.spec import TokenizerSpec
from megatron.training.tokenizer.tiktoken import CustomTikTokenizer as CustomTikTokenizer


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
