"""Index arrays of datasets: C++ where ``helpers_cpp`` is installed, else numpy; equal arrays.

None of these functions is a collective; the C++ ones release the interpreter lock.
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
    """[num_samples + 1, 2] (position in ``document_indices``, token offset) of each sample's start.

    ``sizes`` i32: tokens of each document; ``document_indices`` i32: the order in which they are
    read, all epochs in a row.  int32 where every entry fits, else int64.
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
    """[n, 3] (first sentence, sentence after the last, target length) of samples, shuffled.

    ``docs`` i64 [documents + 1]: first sentence of each; ``sizes`` i32: tokens of each sentence.
    A sample ends with the sentence that reaches its target length or with the document, whose last
    sentence is never left alone.  Whole epochs, until there are ``max_num_samples``.  Documents
    with fewer than ``min_num_sent`` sentences, or one of more than 512 tokens, are left out.
    uint32 where every sentence fits, else uint64.
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

    Sample i goes to the dataset furthest behind ``weights * max(i, 1)``, the first of equals.
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
    """The same with weights in proportion to ``sizes``, until every dataset is taken whole."""
    helper = _compiled() or helpers_numpy
    helper.build_exhaustive_blending_indices(
        dataset_index, dataset_sample_index, sizes, num_datasets
    )


def shuffle(values: np.ndarray, random_state: np.random.RandomState) -> None:
    """``random_state.shuffle(values)`` on a vector: same order, same state after, but faster."""
    cpp = _compiled()
    if cpp is None or len(values) > 1 << 32:
        random_state.shuffle(values)
        return
    name, key, used, *gauss = random_state.get_state(legacy=True)
    used = cpp.shuffle(values, key, used)
    random_state.set_state((name, key, used, *gauss))
