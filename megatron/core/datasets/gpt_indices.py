"""Build and cache the three index arrays that map GPT samples to tokens.

document_index i32[E]: sequence numbers in reading order, shuffled, for all epochs.
sample_index [n+1, 2]: start of each sample (position in document_index, token offset).
shuffle_index u32[n]: order in which the dataset returns samples.
Arrays, file names and the use of random numbers are a file format: equal requests must give equal
bytes.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import numpy as np

from megatron.core.config.errors import DataError
from megatron.core.datasets import helpers
from megatron.core.datasets.index_cache import cached_arrays

logger = logging.getLogger(__name__)

# If a smaller share of the last epoch than this is needed, the last epoch is shuffled separately.
# In a joint shuffle many of its samples would displace samples of the complete epochs.
_SEPARATE_BELOW = 0.80
_CHECKED_SAMPLES = 32
_PIECE = 1 << 20
_SAMPLES_AT_ONCE = 1 << 16


@dataclass(frozen=True, kw_only=True)
class SampleRequest:
    """Rule for splitting the sequences ``indices`` of a source into samples."""

    source: str  # path prefix and split, for messages
    indices: np.ndarray  # i32, ascending
    sequence_lengths: np.ndarray  # i32, of the whole source
    num_samples: int | None  # minimum number; None for one epoch
    sequence_length: int
    random_seed: int
    drop_last_partial_sequence: bool = True
    add_extra_token_to_sequence: bool = True

    @property
    def extra(self) -> int:
        """Tokens that a sample reads beyond its length: 1 if it includes the label of the last."""
        return int(self.add_extra_token_to_sequence)


@dataclass(frozen=True)
class GPTIndices:
    """The three index arrays of the module docstring, and the epochs that they cover."""

    document_index: np.ndarray
    sample_index: np.ndarray
    shuffle_index: np.ndarray
    num_epochs: int
    tokens_per_epoch: int


def build_indices(request: SampleRequest) -> GPTIndices:
    """Build the index arrays in memory.

    Raises DataError if the split has no tokens, or too few for one sample.
    """
    tokens_per_epoch = count_tokens(request.sequence_lengths, request.indices)
    num_epochs = _num_epochs(request, tokens_per_epoch)
    samples_before_last, is_last_apart = _last_epoch(request, num_epochs, tokens_per_epoch)
    random_state = np.random.RandomState(request.random_seed)
    document_index = _document_index(request.indices, num_epochs, is_last_apart, random_state)
    sample_index = helpers.build_sample_idx(
        request.sequence_lengths,
        document_index,
        request.sequence_length,
        num_epochs,
        tokens_per_epoch,
        request.drop_last_partial_sequence,
        request.add_extra_token_to_sequence,
    )
    num_samples = len(sample_index) - 1
    if num_samples < 1:
        raise DataError(
            f"{request.source} holds {tokens_per_epoch} tokens, too few for one sample of "
            f"{request.sequence_length}: give it more data or a larger share in --split"
        )
    first_part = samples_before_last if is_last_apart else num_samples
    shuffle_index = _shuffle_index(first_part, num_samples, random_state)
    return GPTIndices(document_index, sample_index, shuffle_index, num_epochs, tokens_per_epoch)


def count_tokens(sequence_lengths: np.ndarray, indices: np.ndarray) -> int:
    """Return the number of tokens in the sequences ``indices``, in constant memory."""
    if len(indices) == 0:
        return 0
    first, last = int(indices[0]), int(indices[-1])
    if last - first + 1 == len(indices):  # contiguous, as the builder makes it: slice, no gather
        return int(sequence_lengths[first : last + 1].sum(dtype=np.int64))
    parts = (indices[at : at + _PIECE] for at in range(0, len(indices), _PIECE))
    return sum(int(sequence_lengths[part].sum(dtype=np.int64)) for part in parts)


def _num_epochs(request: SampleRequest, tokens_per_epoch: int) -> int:
    if tokens_per_epoch == 0:
        raise DataError(
            f"{request.source} holds no tokens ({len(request.indices)} sequences, all empty): "
            "give it more data or a larger share in --split"
        )
    if request.num_samples is None:
        return 1
    wanted = request.num_samples * request.sequence_length + request.extra
    return max(1, -(-wanted // tokens_per_epoch))


def _last_epoch(request: SampleRequest, num_epochs: int, tokens_per_epoch: int) -> tuple[int, bool]:
    """Return the samples of all epochs but the last, and whether to shuffle the last separately."""
    if num_epochs == 1 or request.num_samples is None:
        return 0, False
    before = ((num_epochs - 1) * tokens_per_epoch - request.extra) // request.sequence_length
    per_epoch = (tokens_per_epoch - request.extra) // request.sequence_length
    from_last = request.num_samples - before
    return before, from_last < int(_SEPARATE_BELOW * per_epoch)


def _document_index(
    indices: np.ndarray, num_epochs: int, is_last_apart: bool, random_state: np.random.RandomState
) -> np.ndarray:
    """Return all epochs of ``indices``, shuffled together or with the last epoch separate."""
    document_index = np.tile(np.asarray(indices, np.int32), num_epochs)
    cut = len(indices) * (num_epochs - 1) if is_last_apart else len(document_index)
    helpers.shuffle(document_index[:cut], random_state)
    if is_last_apart:
        helpers.shuffle(document_index[cut:], random_state)
    return document_index


def _shuffle_index(
    first_part: int, num_samples: int, random_state: np.random.RandomState
) -> np.ndarray:
    fits = num_samples < np.iinfo(np.uint32).max - 1
    shuffle_index = np.arange(num_samples, dtype=np.uint32 if fits else np.int64)
    helpers.shuffle(shuffle_index[:first_part], random_state)
    if first_part != num_samples:
        helpers.shuffle(shuffle_index[first_part:], random_state)
    return shuffle_index


def load_or_build_indices(request: SampleRequest, path_prefix: str, description: str) -> GPTIndices:
    """Load the arrays from ``path_prefix-*``; if they are missing, one process builds them.

    Files that are damaged or that belong to other data are rebuilt.  Not a collective.
    """
    tokens_per_epoch = count_tokens(request.sequence_lengths, request.indices)

    def of(documents: np.ndarray, samples: np.ndarray, shuffle: np.ndarray) -> GPTIndices:
        num_epochs = len(documents) // max(1, len(request.indices))
        return GPTIndices(documents, samples, shuffle, num_epochs, tokens_per_epoch)

    def build() -> list[np.ndarray]:
        started_at_s = time.perf_counter()
        built = build_indices(request)
        elapsed_s = time.perf_counter() - started_at_s
        logger.info("built the index of %s in %.2f s", request.source, elapsed_s)
        return [getattr(built, name) for name in _ARRAYS]

    def fits(*arrays: np.ndarray, completely: bool) -> bool:
        found = of(*arrays)
        return _fits(found, request) and (not completely or _fits_completely(found, request))

    return of(*cached_arrays(path_prefix, description, _ARRAYS, build, fits))


_ARRAYS = ("document_index", "sample_index", "shuffle_index")


def _fits(found: GPTIndices, request: SampleRequest) -> bool:
    """Return whether cached arrays can come from this request: check shapes and a few samples.

    This rejects the cache of a file with the same name but other contents.  The cost does not
    grow with the data.
    """
    documents, samples = found.document_index, found.sample_index
    has_shapes = (
        documents.dtype == np.int32
        and documents.ndim == 1
        and len(documents) == found.num_epochs * len(request.indices)
        and samples.dtype in (np.int32, np.int64)
        and samples.ndim == 2
        and samples.shape[1] == 2
        and found.shuffle_index.dtype in (np.uint32, np.int64)
        and found.shuffle_index.shape == (len(samples) - 1,)
        and found.num_epochs == _num_epochs(request, found.tokens_per_epoch)
    )
    if not has_shapes or len(samples) < 2:
        return False
    num_tokens = found.num_epochs * found.tokens_per_epoch - request.extra
    num_full = num_tokens // request.sequence_length
    is_cut = not request.drop_last_partial_sequence and num_tokens % request.sequence_length > 0
    if len(samples) - 1 != num_full + is_cut:
        return False
    checked = np.linspace(0, num_full - 1, min(num_full, _CHECKED_SAMPLES)).astype(np.int64)
    return all(_spans_one_sample(found, request, int(n)) for n in checked)


def _spans_one_sample(found: GPTIndices, request: SampleRequest, n: int) -> bool:
    (first, first_offset), (last, last_offset) = found.sample_index[n : n + 2].tolist()
    if not 0 <= first <= last < len(found.document_index):
        return False
    documents = found.document_index[first : last + 1]
    low, high = int(request.indices[0]), int(request.indices[-1])
    if documents.min() < low or documents.max() > high:
        return False
    lengths = request.sequence_lengths[documents]
    num_tokens = int(lengths[:-1].sum(dtype=np.int64)) - first_offset + last_offset
    ends_inside = last_offset + request.extra <= int(lengths[-1])
    return bool(ends_inside and num_tokens == request.sequence_length)


def _fits_completely(found: GPTIndices, request: SampleRequest) -> bool:
    """Return whether a build can have made every entry; memory is 16 bytes per sequence."""
    low, high = int(request.indices[0]), int(request.indices[-1])
    counts = np.zeros(high - low + 1, np.int64)
    num_at_once = max(_PIECE, len(counts))  # bincount returns len(counts) entries for each chunk
    for at in range(0, len(found.document_index), num_at_once):
        part = found.document_index[at : at + num_at_once]
        if part.min() < low or part.max() > high:
            return False
        counts += np.bincount(part - low, minlength=len(counts))
    if (counts[request.indices - low] != found.num_epochs).any():
        return False
    is_given_out = np.zeros(len(found.shuffle_index), bool)
    for at in range(0, len(found.shuffle_index), _PIECE):
        part = found.shuffle_index[at : at + _PIECE]
        if part.min() < 0 or part.max() >= len(is_given_out):
            return False
        is_given_out[part] = True
    return bool(is_given_out.all()) and _has_sample_boundaries(found, request)


def _has_sample_boundaries(found: GPTIndices, request: SampleRequest) -> bool:
    """Return whether samples start where ``helpers.build_sample_idx`` would start them."""
    back = 1 - request.extra
    usable = found.num_epochs * found.tokens_per_epoch - request.extra
    first, tokens_before = 0, 0  # position of the previous boundary, tokens before it
    if found.sample_index[0].any():
        return False
    for at in range(1, len(found.sample_index), _SAMPLES_AT_ONCE):
        rows = found.sample_index[at : at + _SAMPLES_AT_ONCE].astype(np.int64)
        positions, offsets = rows[:, 0], rows[:, 1]
        is_rising = positions[0] >= first and (np.diff(positions) >= 0).all()
        if not is_rising or positions[-1] >= len(found.document_index):
            return False
        documents = found.document_index[first : int(positions[-1]) + 1]
        lengths = request.sequence_lengths[documents].astype(np.int64)
        starts = (tokens_before + np.cumsum(lengths) - lengths)[positions - first]
        boundaries = np.arange(at, at + len(rows)) * request.sequence_length
        tokens = np.minimum(boundaries, usable) - back
        ends = starts + lengths[positions - first]
        is_right = (starts + offsets == tokens + back) & (starts <= tokens) & (tokens < ends)
        if not is_right.all():
            return False
        first, tokens_before = int(positions[-1]), int(starts[-1])
    return True
