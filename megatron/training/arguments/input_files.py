"""Look up the input files of a run for --check-only: missing files, vocabulary size.

The check may run on another machine than the training run, so a missing file is not an error.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Iterator
from glob import glob
from pathlib import Path
from typing import NamedTuple

from megatron.core.config.errors import ConfigError, DataError, MissingDependency
from megatron.core.datasets.retro.project import load_project
from megatron.core.datasets.tar_shards import shard_paths
from megatron.training.arguments.options import GIVEN
from megatron.training.arguments.sections import flags_and_defaults
from megatron.training.config.data import TEXT_ENDS
from megatron.training.config.preference import reads_conversations
from megatron.training.config.tokenizer import TokenizerConfig
from megatron.training.models.registry import model_kind
from megatron.training.process.rank_print import print_rank_0
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
# Names of the splits of a DatasetDict; the first one after train is for evaluation.
_SPLITS = ("train", "validation", "valid", "val", "dev", "test")
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


# Setting of a RETRO project -> flag that it determines; of files the path in the project's folder.
_OF_PROJECT = {
    f"retro_gpt_{name}": name
    for name in (
        *("split", "seed", "seq_length", "train_samples", "global_batch_size", "eval_interval"),
        *("eval_iters", "tokenizer_type", "tokenizer_model", "vocab_file", "merge_file"),
    )
} | {"retro_gpt_chunk_length": "retro_chunk_length"}
_FILES_OF_PROJECT = ("tokenizer_model", "vocab_file", "merge_file")


def take_retro_project(ns: Namespace) -> None:
    """Set, in place, what the project of --retro-project-dir determines.

    Raises ConfigError that lists every flag with another value, DataError without a project.
    """
    folder = ns.retro_project_dir
    if (
        folder is None
        or not ns.retro_add_retriever
        or not model_kind(ns.model_kind).reads_neighbors
    ):
        return
    project = load_project(folder)
    values = vars(ns)
    problems = []
    for setting, name in _OF_PROJECT.items():
        wanted = getattr(project, setting)
        if wanted is None:
            continue
        if name in _FILES_OF_PROJECT:
            wanted = str(Path(folder, wanted))
        flag, default = flags_and_defaults()[name]
        is_given = name in values[GIVEN] if GIVEN in values else values[name] != default
        if is_given and values[name] != wanted:
            problems.append(
                f"{flag} {values[name]}: the neighbors in {folder} were looked up for {wanted}; "
                "leave the flag out, or preprocess in another --retro-project-dir"
            )
        values[name] = wanted
    if ns.train_iters is not None and ns.train_samples is not None:
        problems.append(
            f"--train-iters {ns.train_iters}: the neighbors in {folder} were looked up for "
            f"{ns.train_samples} samples; leave the flag out, or end earlier with --exit-interval"
        )
    ConfigError.raise_for(problems)
    if not (ns.mock_data or ns.data_path or ns.train_data_path or ns.data_args_path):
        paths, weights = project.blend
        pairs = zip(weights or (), paths, strict=False)
        ns.data_path = [str(word) for pair in pairs for word in pair] or list(paths)


def take_splits_of_dataset(ns: Namespace) -> None:
    """Replace --data-path, in place, by the splits of the folder if `datasets` saved several there.

    Without a validation split the test split is the one for evaluation.  Raises DataError if there
    is no split for training.
    """
    folder = Path(ns.data_path[0]) if len(ns.data_path or ()) == 1 else None
    if (
        folder is None
        or not reads_conversations(ns)
        or not (folder / "dataset_dict.json").is_file()
    ):
        return
    found = {name: str(folder / name) for name in _SPLITS if (folder / name).is_dir()}
    if "train" not in found:
        raise DataError(f"--data-path {folder} is a DatasetDict without a split train")
    train = [found.pop("train")]
    if not found:
        ns.data_path = train
        return
    valid = next(iter(found))
    ns.data_path = None
    ns.train_data_path = train
    ns.valid_data_path = [found.pop(valid)]
    ns.test_data_path = [found["test"]] if "test" in found else None
    print_rank_0(f"> {folder} is a DatasetDict: {valid} is the split for evaluation")


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
                if prefix.endswith(TEXT_ENDS) and len(gone) == 2:
                    gone = [] if glob(prefix) else ["such text"]
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
