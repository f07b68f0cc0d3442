"""What ``helpers.cpp`` does, in numpy: the same arrays where no compiled helper is installed.

Sample indices are built in pieces, so that memory stays a constant beyond the result.
"""

from __future__ import annotations

import numpy as np

_DOCUMENTS_AT_ONCE = 1 << 16  # the piece and its sums stay in the processor's cache


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
