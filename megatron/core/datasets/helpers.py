"""Build index arrays of datasets, in C++ if ``helpers_cpp`` is installed, else in numpy.

Both implementations return equal arrays.  No function is a collective; the C++ functions release
the GIL.
"""

from __future__ import annotations

import importlib
import logging
from functools import cache
from types import ModuleType

import numpy as np

from megatron.core.datasets import helpers_numpy
from megatron.core.optional import why_missing

logger = logging.getLogger(__name__)

_CPP = "megatron.core.datasets.helpers_cpp"


@cache
def _compiled() -> ModuleType | None:
    reason = why_missing(_CPP)
    if reason is None:
        module = importlib.import_module(_CPP)
        if "build_mapping_uint32" in vars(module):
            logger.info("dataset indices are built by the compiled helper")
            return module
        reason = f"{_CPP} is of an older version: python setup.py build_ext --inplace"
    logger.warning("dataset indices are built by numpy, some times slower: %s", reason)
    return None


def build_sample_idx(
    sizes: np.ndarray,
    document_indices: np.ndarray,
    sequence_length: int,
    num_epochs: int,
    tokens_per_epoch: int,
    drop_last_partial_sequence: bool = True,
    add_extra_token_to_sequence: bool = True,
) -> np.ndarray:
    """Return the start of each sample: [num_samples + 1, 2], the last row being the end.

    Columns: position in ``document_indices``, token offset in that document.  ``sizes`` i32: tokens
    of each document; ``document_indices`` i32: order in which documents are read, for all epochs.
    int32 if every entry fits, else int64.
    """
    largest = max(len(document_indices), int(sizes.max()) if len(sizes) else 0)
    is_small = largest <= np.iinfo(np.int32).max
    arguments = (
        sizes,
        document_indices,
        sequence_length,
        num_epochs,
        tokens_per_epoch,
        drop_last_partial_sequence,
    )
    cpp = _compiled()
    if cpp is None:
        dtype = np.int32 if is_small else np.int64
        return helpers_numpy.build_sample_idx(*arguments, add_extra_token_to_sequence, dtype)
    build = cpp.build_sample_idx_int32 if is_small else cpp.build_sample_idx_int64
    built: np.ndarray = build(*arguments, int(add_extra_token_to_sequence))
    return built


def build_mapping(
    docs: np.ndarray,
    sizes: np.ndarray,
    num_epochs: int,
    max_num_samples: int,
    max_seq_length: int,
    short_seq_prob: float,
    seed: int,
    verbose: bool = False,
    min_num_sent: int = 2,
) -> np.ndarray:
    """Return shuffled samples of sentences: [n, 3] (first sentence, end sentence, target length).

    ``docs`` i64 [documents + 1]: first sentence of each document; ``sizes`` i32: tokens of each
    sentence.  The end sentence is exclusive.  A sample ends with the sentence that reaches its
    target length, after at least ``min_num_sent`` sentences, or with the document.  If only one
    sentence of the document would remain, the sample includes it.  Complete epochs are added until
    there are ``max_num_samples`` samples.  Documents with fewer than ``min_num_sent`` sentences, or
    with a sentence of more than 512 tokens, are skipped.  uint32 if every sentence number fits,
    else uint64.
    """
    if max_seq_length < 2:
        raise ValueError("max_seq_length must be at least 2")
    is_small = len(sizes) <= np.iinfo(np.uint32).max
    docs = np.ascontiguousarray(docs, np.int64)
    arguments = (docs, sizes, num_epochs, max_num_samples, max_seq_length, short_seq_prob, seed)
    cpp = _compiled()
    if cpp is None:
        dtype = np.uint32 if is_small else np.uint64
        return helpers_numpy.build_mapping(*arguments, min_num_sent, dtype)
    build = cpp.build_mapping_uint32 if is_small else cpp.build_mapping_uint64
    built: np.ndarray = build(*arguments, min_num_sent)
    return built


def build_blending_indices(
    dataset_index: np.ndarray,
    dataset_sample_index: np.ndarray,
    weights: np.ndarray,
    num_datasets: int,
    size: int,
    verbose: bool = False,
) -> None:
    """Fill i16 ``dataset_index`` and i64 ``dataset_sample_index``, both of ``size`` entries.

    Sample i comes from the dataset with the largest deficit, ``weights * max(i, 1)`` minus the
    samples already taken from it; from the first such dataset if several are equal.
    """
    helper = _compiled() or helpers_numpy
    helper.build_blending_indices(
        dataset_index, dataset_sample_index, weights, num_datasets, size, verbose
    )


def build_exhaustive_blending_indices(
    dataset_index: np.ndarray,
    dataset_sample_index: np.ndarray,
    sizes: np.ndarray,
    num_datasets: int,
) -> None:
    """Fill both arrays as ``build_blending_indices``, with every sample of every dataset once.

    The weights are proportional to ``sizes``.
    """
    helper = _compiled() or helpers_numpy
    helper.build_exhaustive_blending_indices(
        dataset_index, dataset_sample_index, sizes, num_datasets
    )


def shuffle(values: np.ndarray, random_state: np.random.RandomState) -> None:
    """Shuffle a vector in place, faster than ``random_state.shuffle(values)``.

    The order and the final state of ``random_state`` are the same as with numpy's shuffle.
    """
    cpp = _compiled()
    if cpp is None or len(values) > 1 << 32:
        random_state.shuffle(values)
        return
    name, key, used, *gauss = random_state.get_state(legacy=True)
    used = cpp.shuffle(values, key, used)
    random_state.set_state((name, key, used, *gauss))
