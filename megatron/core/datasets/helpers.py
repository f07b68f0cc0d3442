"""Build index arrays of datasets, in C++ if ``helpers_cpp`` is installed, else in numpy.

Both implementations return equal arrays.  Sample indices are built in chunks, so that memory beyond
the result is constant.  No function is a collective; the C++ functions release the GIL.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from functools import cache
from types import ModuleType

import numpy as np

from megatron.core.optional import why_missing

logger = logging.getLogger(__name__)

_CPP = "megatron.core.datasets.helpers_cpp"
LONGEST_SENTENCE = 512  # tokens; documents with a longer sentence are skipped
_DOCUMENTS_AT_ONCE = 1 << 16  # a chunk and its sums fit in the CPU cache
_DRAWS_AT_ONCE = 4096


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
    int32 if every entry fits, else int64.  A boundary belongs to the document of the sample's first
    token or, without the extra token (the last label), to the document of the token before it.
    """
    largest = max(len(document_indices), int(sizes.max()) if len(sizes) else 0)
    is_small = largest <= np.iinfo(np.int32).max
    extra = int(add_extra_token_to_sequence)
    if (cpp := _compiled()) is not None:
        build = cpp.build_sample_idx_int32 if is_small else cpp.build_sample_idx_int64
        built: np.ndarray = build(
            sizes,
            document_indices,
            sequence_length,
            num_epochs,
            tokens_per_epoch,
            drop_last_partial_sequence,
            extra,
        )
        return built
    if sequence_length < 1:
        raise ValueError("seq_length must be at least 1")
    back = 1 - extra
    usable = max(num_epochs * tokens_per_epoch - extra, 0)
    num_samples = (
        usable + (0 if drop_last_partial_sequence else sequence_length - 1)
    ) // sequence_length
    result = np.empty((num_samples + 1, 2), np.int32 if is_small else np.int64)
    result[0] = 0
    row = 1  # the next one
    num_tokens = 0  # before this chunk
    for first in range(0, len(document_indices), _DOCUMENTS_AT_ONCE):
        if row > num_samples:
            break
        documents = document_indices[first : first + _DOCUMENTS_AT_ONCE]
        ends = num_tokens + np.cumsum(sizes[documents], dtype=np.int64)
        # first boundary whose token is beyond this chunk
        stop = min(num_samples, (int(ends[-1]) + back - 1) // sequence_length) + 1
        if stop == num_samples and usable - back < ends[-1]:
            stop += 1  # the end of a shorter last sample
        tokens = np.minimum(np.arange(row, stop, dtype=np.int64) * sequence_length, usable) - back
        at = np.searchsorted(ends, tokens, side="right")
        starts = ends[at] - sizes[documents[at]]
        result[row:stop, 0] = first + at
        result[row:stop, 1] = tokens - starts + back
        row = max(row, stop)
        num_tokens = int(ends[-1])
    if row <= num_samples:
        raise ValueError("the documents hold fewer tokens than the epochs ask for")
    return result


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
    if (cpp := _compiled()) is not None:
        build = cpp.build_mapping_uint32 if is_small else cpp.build_mapping_uint64
        built: np.ndarray = build(
            docs,
            sizes,
            num_epochs,
            max_num_samples,
            max_seq_length,
            short_seq_prob,
            seed,
            min_num_sent,
        )
        return built
    if len(docs) and (docs[0] < 0 or docs[-1] > len(sizes) or (np.diff(docs) < 0).any()):
        raise IndexError("the documents name a sentence that is not there")
    targets = _target_lengths(max_seq_length, short_seq_prob, seed)
    ends = np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)))  # tokens before each sentence
    num_long = np.concatenate(([0], np.cumsum(sizes > LONGEST_SENTENCE)))
    is_used = (np.diff(docs) >= min_num_sent) & (num_long[docs[1:]] == num_long[docs[:-1]])
    documents = np.stack((docs[:-1], docs[1:]), 1)[is_used].tolist()
    rows: list[tuple[int, int, int]] = []
    for _ in range(num_epochs if documents else 0):
        if len(rows) >= max_num_samples:
            break
        for first, end in documents:
            target = next(targets)
            while first < end:
                reached = int(np.searchsorted(ends[first + 1 : end], ends[first] + target))
                stop = max(first + reached + 1, first + min_num_sent)
                stop = stop if end - stop > 1 else end
                rows.append((first, stop, target))
                first = stop
                target = next(targets)
    result = np.array(rows, np.uint32 if is_small else np.uint64).reshape(-1, 3)
    draws = _mersenne_twister_64(seed + 1)
    order = list(range(len(rows)))
    for i in range(len(rows) - 1, 0, -1):
        other = next(draws) % (i + 1)
        order[i], order[other] = order[other], order[i]
    return result[order]


def _target_lengths(longest: int, short_seq_prob: float, seed: int) -> Iterator[int]:
    random = np.random.RandomState(seed)  # seeded with an integer: std::mt19937 of the C++ code
    ratio = int(1.0 / short_seq_prob + 0.5) if short_seq_prob > 0 else 0
    while True:
        drawn = random.randint(0, 1 << 32, _DRAWS_AT_ONCE, np.uint32).astype(np.int64)
        is_short = drawn % ratio == 0 if ratio else np.zeros(len(drawn), bool)
        yield from np.where(is_short, 2 + drawn % (longest - 1), longest).tolist()


def _mersenne_twister_64(seed: int) -> Iterator[int]:
    """Yield the random numbers of MT19937-64 (std::mt19937_64), which numpy does not have."""
    words = [seed]
    for i in range(1, 312):
        mixed = 6364136223846793005 * (words[-1] ^ (words[-1] >> 62)) + i
        words.append(mixed & 0xFFFFFFFFFFFFFFFF)
    state, low = np.array(words, np.uint64), np.uint64(0x7FFFFFFF)

    def twisted(left: np.ndarray, right: np.ndarray) -> np.ndarray:
        y = (left & ~low) | (right & low)
        mixed: np.ndarray = (y >> np.uint64(1)) ^ (y & np.uint64(1)) * np.uint64(0xB5026F5AA96619E9)
        return mixed

    while True:
        old = state.copy()
        state[:156] = old[156:] ^ twisted(old[:156], old[1:157])
        state[156:] = state[:156] ^ twisted(old[156:], np.append(old[157:], state[0]))
        y = state ^ (state >> np.uint64(29)) & np.uint64(0x5555555555555555)
        y ^= (y << np.uint64(17)) & np.uint64(0x71D67FFFEDA60000)
        y ^= (y << np.uint64(37)) & np.uint64(0xFFF7EEE000000000)
        yield from (y ^ (y >> np.uint64(43))).tolist()


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
    if (cpp := _compiled()) is not None:
        cpp.build_blending_indices(
            dataset_index, dataset_sample_index, weights, num_datasets, size, verbose
        )
        return
    weights = np.asarray(weights, np.float64)[:num_datasets]
    taken = np.zeros(num_datasets)
    deficits = np.empty(num_datasets)
    for i in range(size):
        np.multiply(weights, max(i, 1), out=deficits)
        np.subtract(deficits, taken, out=deficits)
        best = deficits.argmax()
        dataset_index[i] = best
        dataset_sample_index[i] = taken[best]
        taken[best] += 1


def build_exhaustive_blending_indices(
    dataset_index: np.ndarray,
    dataset_sample_index: np.ndarray,
    sizes: np.ndarray,
    num_datasets: int,
) -> None:
    """Fill both arrays as ``build_blending_indices``, with every sample of every dataset once.

    The weights are proportional to ``sizes``.  A dataset is skipped once all its samples are taken.
    """
    if (cpp := _compiled()) is not None:
        cpp.build_exhaustive_blending_indices(
            dataset_index, dataset_sample_index, sizes, num_datasets
        )
        return
    sizes = np.asarray(sizes, np.int64)[:num_datasets]
    weights = sizes / float(sizes.sum())
    taken = np.zeros(num_datasets)
    left = np.where(sizes > 0, 0.0, -np.inf)  # added to the deficit: -inf for an exhausted dataset
    for i in range(int(sizes.sum())):
        best = (weights * max(i, 1) - taken + left).argmax()
        dataset_index[i] = best
        dataset_sample_index[i] = taken[best]
        taken[best] += 1
        if taken[best] == sizes[best]:
            left[best] = -np.inf


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
