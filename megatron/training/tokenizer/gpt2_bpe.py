"""GPT2BPETokenizer: byte-level BPE from ``vocab.json`` and ``merges.txt``."""

from __future__ import annotations

from megatron.core.config.errors import ConfigError
from megatron.core.optional import require
from megatron.training.tokenizer.bpe_rules import BpeRules
from megatron.training.tokenizer.library import LibraryTokenizer
from megatron.training.tokenizer.spec import TokenizerSpec


class _GPT2BPETokenizer(LibraryTokenizer):
    """Text that reads like a special token is text; ``<|endoftext|>`` ends a document."""

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

    @classmethod
    def build(cls, spec: TokenizerSpec) -> _GPT2BPETokenizer:
        """From the command line: --vocab-file and --merge-file."""
        return cls(spec.need("vocab_file"), spec.need("merge_file"))

    def bpe_rules(self) -> BpeRules:
        return BpeRules(self._library.to_str())
