"""Look up the input files of a run for --check-only: missing files, vocabulary size.

The check may run on another machine than the training run, so a missing file is not an error.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from megatron.core.config.errors import ConfigError, DataError, MissingDependency
from megatron.core.datasets.tar_shards import shard_paths
from megatron.training.config.preference import reads_conversations
from megatron.training.config.tokenizer import TokenizerConfig
from megatron.training.models.registry import model_kind
from megatron.training.tokenizer.base import TokenizerSpec
from megatron.training.tokenizer.tokenizer import create_tokenizer

_FILES = (
    "language_model_checkpoint",
    "audio_encoder_model",
    "vocab_file",
    "merge_file",
    "tokenizer_model",
    "chat_template",
    "eval_generate",
    "data_args_path",
    "per_split_data_args_path",
)
_PREFIXES = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
# Vocabulary sizes of tokenizers whose files are usually the published ones.
_USUAL_SIZES = {
    "GPT2BPETokenizer": 50257,
    "Llama2Tokenizer": 32000,
    "BertWordPieceLowerCase": 30522,
    "BertWordPieceCase": 28996,
}


class Vocabulary(NamedTuple):
    """Number of tokens before padding, None if unknown, and a note for the user or ""."""

    size: int | None
    note: str = ""


def missing_files(args: Namespace) -> list[str]:
    """Return one line for each given file or data prefix that this machine does not have."""
    missing = [
        f"{_flag(name)} {path}: no such file or folder on this machine"
        for name in _FILES
        if (path := getattr(args, name, None)) is not None and not Path(path).exists()
    ]
    kind = model_kind(args.model_kind)
    for name in _PREFIXES:
        for prefix in _prefixes(getattr(args, name, None) or ()):
            if kind.classifies_images or reads_conversations(args):
                is_there = Path(prefix).exists()
                what = "such a file or folder"
                if kind.classifies_images:
                    is_there = Path(prefix).is_dir()
                    what = "such a folder"
                gone = [] if is_there else [what]
            elif kind.reads_images:
                try:
                    gone = [shard for shard in shard_paths(prefix) if not Path(shard).is_file()]
                except DataError as error:
                    missing.append(f"{_flag(name)} {error}")
                    continue
            else:
                paths = () if "://" in prefix else (f"{prefix}.idx", f"{prefix}.bin")
                gone = [path for path in paths if not Path(path).is_file()]
            if gone:
                found = ", ".join(gone[:3])
                missing.append(f"{_flag(name)} {prefix}: not on this machine: {found}")
    return missing


def vocabulary_of(config: TokenizerConfig) -> Vocabulary:
    """Count the tokens in the tokenizer's files; without the files assume the usual size."""
    kind = config.tokenizer_type
    if config.padded_vocab_size is not None or kind in (None, "NullTokenizer"):
        return Vocabulary(config.vocab_size)
    paths = [p for p in (config.tokenizer_model, config.vocab_file) if p is not None]
    # A name that is not a path would be looked up on the network.
    if paths and all(Path(path).exists() for path in paths):
        try:
            return Vocabulary(create_tokenizer(TokenizerSpec.of(config)).vocab_size)
        except (ConfigError, DataError, MissingDependency, OSError) as error:
            reason = f"its tokenizer cannot be built here: {error}"
    else:
        reason = "the files of its tokenizer are not on this machine"
    if config.vocab_size is not None:
        return Vocabulary(config.vocab_size, f"vocabulary: --vocab-size is assumed; {reason}")
    size = _USUAL_SIZES.get(kind or "")
    if size is not None:
        size += config.vocab_extra_ids
        return Vocabulary(size, f"vocabulary: the {size:,} tokens of {kind} are assumed; {reason}")
    return Vocabulary(None, f"vocabulary: {reason}")


def _prefixes(words: Iterable[str]) -> Iterator[str]:
    """Yield the data prefixes of a list that may contain a weight before each prefix."""
    for word in words:
        try:
            float(word)
        except ValueError:
            yield word


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
