"""Fingerprint of the tokenizer that wrote a data set: ``<prefix>.tokenizer.json``.

The fingerprint covers the ids that the tokenizer gives (of the vocabulary, of some texts, of EOD),
not the path of its files or the library that runs it.  ``<extra_id_N>`` at the end of the
vocabulary are excluded: --vocab-extra-ids appends them, and every other id stays the same.

The checks find mistakes in tokenizer and token files before a model is built.  Each raises
ConfigError or DataError with the values and a suggested fix.  They read a bounded part of the data;
none is a collective.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from megatron.core.config.errors import ConfigError, DataError
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.training.tokenizer.base import MegatronTokenizer, MissingToken, _NullTokenizer

# Texts on which tokenizers with equal vocabularies but different rules differ.
_TEXTS = (
    "Hello, world! It's 1,234.5 o'clock.\n\n\tdef f(x):\n        return x  # na\u00efve caf\u00e9",
    " \u4f60\u597d\uff0c\u4e16\u754c \U0001f600 e\u0301 \ufb01 \u00a0 ",
)


_EXTRA_ID = re.compile(r"<extra_id_\d+>")

Vocabulary = list[tuple[int, str]]  # sorted


@dataclass(frozen=True)
class Fingerprint:
    """Content of the sidecar file."""

    tokenizer: str
    vocab_size: int
    eod: int | None
    sha256: str

    @classmethod
    def of(cls, tokenizer: MegatronTokenizer) -> Fingerprint:
        """Digest the vocabulary and the behavior of ``tokenizer``."""
        vocabulary, vocab_size = _vocabulary(tokenizer)
        digest = _digest(tokenizer, vocabulary)
        return cls(tokenizer.name, vocab_size, tokenizer.id_of("eod"), digest)

    def fits(self, tokenizer: MegatronTokenizer) -> bool:
        """Return whether every id of the data means the same to ``tokenizer``.

        It may have more special tokens behind its vocabulary.
        """
        vocabulary, vocab_size = _vocabulary(tokenizer)
        more = vocab_size - self.vocab_size
        if more > 0 and {token for _, token in vocabulary[-more:]} <= tokenizer.appended_tokens():
            vocabulary = vocabulary[:-more]
        return _digest(tokenizer, vocabulary) == self.sha256

    def write(self, prefix: str) -> None:
        """Write the sidecar of ``prefix`` atomically."""
        temporary = sidecar_path(prefix) + ".tmp"
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(asdict(self), file, indent=1)
        os.replace(temporary, sidecar_path(prefix))

    def __str__(self) -> str:
        return f"{self.tokenizer} ({self.vocab_size} ids, EOD {self.eod}, {self.sha256[:12]})"


def sidecar_path(prefix: str) -> str:
    """Return the path of the fingerprint, which is beside ``prefix.bin``."""
    return prefix + ".tokenizer.json"


def read_fingerprint(prefix: str) -> Fingerprint | None:
    """Read the sidecar of ``prefix``; None if there is none.  Raises DataError if it is damaged."""
    path = sidecar_path(prefix)
    try:
        with open(path, encoding="utf-8") as file:
            found = Fingerprint(**json.load(file))
        if not (isinstance(found.sha256, str) and isinstance(found.vocab_size, int)):
            raise TypeError("sha256 must be text and vocab_size a number")
        return found
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise DataError(f"{path}: {error}; remove it, or preprocess the data again") from error


def _vocabulary(tokenizer: MegatronTokenizer) -> tuple[Vocabulary, int]:
    """Return the vocabulary and its size, both without ``<extra_id_N>`` at the end."""
    # Sorted by id and token: the order of two tokens with one id may differ between processes.
    vocabulary = sorted((i, token) for token, i in tokenizer.vocab.items())
    vocab_size = tokenizer.vocab_size
    while vocabulary and _EXTRA_ID.fullmatch(vocabulary[-1][1]):
        vocabulary.pop()
        vocab_size -= 1
    return vocabulary, vocab_size


def _digest(tokenizer: MegatronTokenizer, vocabulary: Vocabulary) -> str:
    texts = () if isinstance(tokenizer, _NullTokenizer) else _TEXTS
    ids = [list(map(int, tokenizer.tokenize(text))) for text in texts]
    tokens = "\0".join(token for _, token in vocabulary)
    digest = hashlib.sha256(tokens.encode(errors="surrogatepass"))
    digest.update(repr([[i for i, _ in vocabulary], ids, tokenizer.id_of("eod")]).encode())
    return digest.hexdigest()


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
    needed = max(max(tokenizer.vocab.values(), default=-1) + 1, tokenizer.vocab_size)
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
