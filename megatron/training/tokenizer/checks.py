"""Checks that find mistakes in tokenizer and token files before a model is built.

Each check raises ConfigError or DataError with the values and a suggested fix.  The checks read a
bounded part of the data; none is a collective.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from megatron.core.config.errors import ConfigError, DataError
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.training.tokenizer.base import MegatronTokenizer, MissingToken
from megatron.training.tokenizer.fingerprint import Fingerprint, read_fingerprint
from megatron.training.tokenizer.null import _NullTokenizer

_SAMPLED_SEQUENCES = 256  # spread evenly over the file
_SAMPLED_OBJECTS = 16  # fewer in object storage, where each read is a request
_SAMPLED_TOKENS = 1 << 22
_LONGEST_SAMPLE = 1 << 16  # tokens that are read, at the end of a sequence


def check_eod(tokenizer: MegatronTokenizer, wanted_by: str) -> int:
    """Return the EOD id.  Raises ConfigError naming ``wanted_by`` if the tokenizer has none."""
    try:
        return tokenizer.eod
    except MissingToken as error:
        raise ConfigError(f"{wanted_by} needs the id that ends a document: {error}") from error


def check_vocab(tokenizer: MegatronTokenizer, padded_vocab_size: int, tp: int = 1) -> None:
    """Raise ConfigError unless every id of the tokenizer has a row in the embedding.

    Its rows must also divide by the ``tp`` tensor-parallel ranks.
    """
    largest = max(tokenizer.vocab.values(), default=-1)
    needed = max(largest + 1, tokenizer.vocab_size)
    if needed > padded_vocab_size:
        raise ConfigError(
            f"--padded-vocab-size {padded_vocab_size} is fewer than the {needed} ids of "
            f"{tokenizer.name}; raise it to at least {needed}; without the flag it follows from "
            "the tokenizer"
        )
    if padded_vocab_size % tp:
        raise ConfigError(
            f"--padded-vocab-size {padded_vocab_size}, from the command line or from "
            f"--use-checkpoint-args, is not a multiple of --tensor-model-parallel-size {tp}: give "
            f"--padded-vocab-size {-(-padded_vocab_size // tp) * tp}"
        )


def check_same_tokenizer(prefix: str, tokenizer: MegatronTokenizer) -> None:
    """Raise DataError unless the fingerprint ``prefix.tokenizer.json`` fits ``tokenizer``.

    Data without this file is accepted.  NullTokenizer does not read text and fits any data.
    """
    written = read_fingerprint(prefix)
    if written is None or isinstance(tokenizer, _NullTokenizer):
        return
    if not written.fits(tokenizer):
        raise DataError(
            f"{prefix} was written with {written}, this run has {Fingerprint.of(tokenizer)}: "
            "give this run the same tokenizer files, or preprocess the data again (removing "
            f"{prefix}.tokenizer.json skips this check)"
        )


def check_data_ids(dataset: IndexedDataset, padded_vocab_size: int) -> None:
    """Raise DataError if a sample of the data has an id outside of the vocabulary."""
    for tokens in _sample(dataset):
        if not tokens.size:
            continue
        largest, smallest = int(tokens.max()), int(tokens.min())
        if largest >= padded_vocab_size or smallest < 0:
            wrong = largest if largest >= padded_vocab_size else smallest
            raise DataError(
                f"{dataset.path_prefix} holds the id {wrong}, the vocabulary has ids 0 to "
                f"{padded_vocab_size - 1}: the data is of another tokenizer; preprocess it again"
            )


def check_data_has_eod(dataset: IndexedDataset, eod: int, flags: Sequence[str]) -> None:
    """Raise DataError if ``flags`` act at document ends and a sample of the data has no EOD."""
    if flags and not any(np.any(tokens == eod) for tokens in _sample(dataset)):
        raise DataError(
            f"{' '.join(flags)} act at the end of documents (id {eod}), and a sample of "
            f"{dataset.path_prefix} has none; preprocess it with --append-eod, or leave the flags "
            "out"
        )


def check_data(
    dataset: IndexedDataset,
    tokenizer: MegatronTokenizer,
    padded_vocab_size: int,
    eod_flags: Sequence[str] = (),
) -> None:
    """Run all checks of one data set, at the start of training.

    ``eod_flags`` are those given of --reset-position-ids, --reset-attention-mask and
    --eod-mask-loss.
    """
    check_same_tokenizer(dataset.path_prefix, tokenizer)
    check_data_ids(dataset, padded_vocab_size)
    if eod_flags:
        check_data_has_eod(dataset, check_eod(tokenizer, " ".join(eod_flags)), eod_flags)


def _sample(dataset: IndexedDataset) -> Iterator[np.ndarray]:
    """Yield the ends of evenly spaced sequences, a few million tokens at most."""
    limit = _SAMPLED_SEQUENCES if dataset.object_storage_config is None else _SAMPLED_OBJECTS
    count = min(len(dataset), limit)
    left = _SAMPLED_TOKENS
    for index in np.linspace(0, len(dataset) - 1, count).astype(np.int64):
        length = int(dataset.sequence_lengths[index])
        taken = min(length, _LONGEST_SAMPLE)
        yield dataset.get(int(index), offset=length - taken, length=taken)
        left -= taken
        if left <= 0:
            return
