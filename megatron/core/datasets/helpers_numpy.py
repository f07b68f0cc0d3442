"""What ``helpers.cpp`` does, in numpy: the same arrays where no compiled helper is installed.

Sample indices are built in pieces, so that memory stays a constant beyond the result.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

LONGEST_SENTENCE = 512  # tokens; a document with a longer one gives no samples of sentences
_DOCUMENTS_AT_ONCE = 1 << 16  # the piece and its sums stay in the processor's cache
_DRAWS_AT_ONCE = 4096


def build_sample_idx(
    sizes: np.ndarray,
    document_idx: np.ndarray,
    seq_length: int,
    num_epochs: int,
    tokens_per_epoch: int,
    drop_last_partial_sequence: bool = True,
    add_extra_token_to_sequence: bool = True,
    dtype: type[np.integer] = np.int32,
) -> np.ndarray:
    """[num_samples + 1, 2]: position in ``document_idx`` and token offset of each sample's start.

    A boundary is named by the document of its first token, or, without the extra token (the last
    label), by the document of the token before it.
    """
    if seq_length < 1:
        raise ValueError("seq_length must be at least 1")
    extra = int(add_extra_token_to_sequence)
    back = 1 - extra
    usable = max(num_epochs * tokens_per_epoch - extra, 0)
    num_samples = (usable + (0 if drop_last_partial_sequence else seq_length - 1)) // seq_length
    result = np.empty((num_samples + 1, 2), dtype)
    result[0] = 0
    row, num_tokens = 1, 0  # both of what lies before the piece
    for first in range(0, len(document_idx), _DOCUMENTS_AT_ONCE):
        if row > num_samples:
            break
        documents = document_idx[first : first + _DOCUMENTS_AT_ONCE]
        ends = num_tokens + np.cumsum(sizes[documents], dtype=np.int64)
        # the first boundary whose token lies beyond the piece
        stop = min(num_samples, (int(ends[-1]) + back - 1) // seq_length) + 1
        if stop == num_samples and usable - back < ends[-1]:
            stop += 1  # the last boundary, where the last sample is cut short
        tokens = np.minimum(np.arange(row, stop, dtype=np.int64) * seq_length, usable) - back
        at = np.searchsorted(ends, tokens, side="right")
        starts = ends[at] - sizes[documents[at]]
        result[row:stop, 0] = first + at
        result[row:stop, 1] = tokens - starts + back
        row, num_tokens = max(row, stop), int(ends[-1])
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
    min_num_sent: int,
    dtype: type[np.unsignedinteger] = np.uint32,
) -> np.ndarray:
    """[n, 3]: first sentence, sentence after the last, and target length of each sample."""
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
                first, target = stop, next(targets)
    result = np.array(rows, dtype).reshape(-1, 3)
    draws = _mersenne_twister_64(seed + 1)
    order = list(range(len(rows)))
    for i in range(len(rows) - 1, 0, -1):
        other = next(draws) % (i + 1)
        order[i], order[other] = order[other], order[i]
    return result[order]


def _target_lengths(longest: int, short_seq_prob: float, seed: int) -> Iterator[int]:
    random = np.random.RandomState(seed)  # seeded with one number, the engine of C++
    ratio = int(1.0 / short_seq_prob + 0.5) if short_seq_prob > 0 else 0
    while True:
        drawn = random.randint(0, 1 << 32, _DRAWS_AT_ONCE, np.uint32).astype(np.int64)
        is_short = drawn % ratio == 0 if ratio else np.zeros(len(drawn), bool)
        yield from np.where(is_short, 2 + drawn % (longest - 1), longest).tolist()


def _mersenne_twister_64(seed: int) -> Iterator[int]:
    """The numbers of MT19937-64, which numpy does not have."""
    words = [seed]
    for i in range(1, 312):
        mixed = 6364136223846793005 * (words[-1] ^ (words[-1] >> 62)) + i
        words.append(mixed & 0xFFFFFFFFFFFFFFFF)
    state, low = np.array(words, np.uint64), np.uint64(0x7FFFFFFF)

    def twisted(left: np.ndarray, right: np.ndarray) -> np.ndarray:
        y = (left & ~low) | (right & low)
        return (y >> np.uint64(1)) ^ (y & np.uint64(1)) * np.uint64(0xB5026F5AA96619E9)

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
    """Fill both arrays: sample i goes to the dataset furthest behind ``weights * max(i, 1)``."""
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
    """The same with weights by size; a dataset leaves when all of it is taken."""
    sizes = np.asarray(sizes, np.int64)[:num_datasets]
    weights = sizes / float(sizes.sum())
    taken = np.zeros(num_datasets)
    left = np.where(sizes > 0, 0.0, -np.inf)  # added to the deficit: -inf where nothing is left
    for i in range(int(sizes.sum())):
        best = (weights * max(i, 1) - taken + left).argmax()
        dataset_index[i] = best
        dataset_sample_index[i] = taken[best]
        taken[best] += 1
        if taken[best] == sizes[best]:
            left[best] = -np.inf
