"""Tokenizers of several libraries behind one interface: text to ids and back."""

from megatron.training.tokenizer.base import MegatronTokenizer as MegatronTokenizer
from megatron.training.tokenizer.base import MissingToken as MissingToken
from megatron.training.tokenizer.base import TokenBatch as TokenBatch
from megatron.training.tokenizer.base import TokenizerSpec as TokenizerSpec
from megatron.training.tokenizer.tokenizer import TOKENIZERS as TOKENIZERS
from megatron.training.tokenizer.tokenizer import build_tokenizer as build_tokenizer
from megatron.training.tokenizer.tokenizer import create_tokenizer as create_tokenizer
from megatron.training.tokenizer.tokenizer import pad_vocab_size as pad_vocab_size
from megatron.training.tokenizer.tokenizer import padding_message as padding_message
from megatron.training.tokenizer.tokenizer import register_tokenizer as register_tokenizer
