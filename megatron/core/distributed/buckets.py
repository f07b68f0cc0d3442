"""Lay out a gradient buffer: the span of each parameter, and the bounds of each bucket.

Pure arithmetic in elements.  Parameters are given in the order of the model and laid out in reverse
order.  A backward pass finishes the last layers first, so it completes the first bucket first, and
the reduction of that bucket overlaps with the rest of the pass.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from math import lcm

PARAM_ALIGNMENT = 64  # a parameter starts on a 128-byte line, also in 16 bits
BUCKET_ALIGNMENT = 128  # divides every rank's share of a bucket; a multiple of PARAM_ALIGNMENT
HIGH_BUS_BANDWIDTH_ALIGNMENT = 2**16  # collectives run fastest on multiples of this


@dataclass(frozen=True)
class Bucket:
    """Range of the buffer, ``start`` to ``stop``; ``params`` are indices in model order."""

    start: int
    stop: int
    params: tuple[int, ...]  # in the order of the buffer


@dataclass(frozen=True)
class BufferLayout:
    """Layout of a buffer: ``spans[i]`` is (start, stop) of parameter i; the rest is padding."""

    spans: tuple[tuple[int, int], ...]
    buckets: tuple[Bucket, ...]

    @property
    def numel(self) -> int:
        """Number of elements of the buffer, including padding."""
        return self.buckets[-1].stop if self.buckets else 0

    def owned_parts(self, rank: int, size: int) -> Iterator[tuple[int, int, int]]:
        """Yield (parameter, start, stop): the elements that ``rank`` of ``size`` ranks owns.

        Every bucket is divided into equal shares, one for each rank: the result of a reduce-scatter
        per bucket.  So a rank's part of the buffer is not contiguous.  It contains at most one part
        of each parameter, and may be empty.  ``start`` and ``stop`` count the elements of the
        parameter, flattened row by row.
        """
        for bucket in self.buckets:
            share = (bucket.stop - bucket.start) // size
            low = bucket.start + rank * share
            for param in bucket.params:
                begin, end = self.spans[param]
                start, stop = max(low, begin), min(low + share, end)
                if start < stop:
                    yield param, start - begin, stop - begin


def plan_buffer(
    numels: Sequence[int],
    bucket_size: int | None,
    *,
    param_alignment: int = 1,
    bucket_multiple: int = 1,
    alone: Container[int] = (),
) -> BufferLayout:
    """Lay out parameters of ``numels`` elements; close a bucket at ``bucket_size`` or more.

    ``bucket_size=None`` makes one bucket.  No parameter is split over buckets, and a bucket's
    length is a multiple of ``bucket_multiple``.  Each parameter in ``alone`` has its own bucket.

    >>> plan_buffer([4, 3, 5], 6).buckets
    (Bucket(start=0, stop=8, params=(2, 1)), Bucket(start=8, stop=12, params=(0,)))
    """
    spans: list[tuple[int, int]] = [(0, 0)] * len(numels)
    buckets: list[Bucket] = []
    start = end = filled = 0
    members: list[int] = []
    for index in reversed(range(len(numels))):
        begin = _round_up(end, param_alignment)
        end = begin + numels[index]
        spans[index] = (begin, end)
        members.append(index)
        filled += numels[index]
        is_full = bucket_size is not None and filled >= bucket_size
        if index == 0 or is_full or index in alone or index - 1 in alone:
            end = start + _round_up(end - start, bucket_multiple)
            buckets.append(Bucket(start, end, tuple(members)))
            start, filled, members = end, 0, []
    return BufferLayout(tuple(spans), tuple(buckets))


def bucket_multiple(group_size: int, *, for_high_bus_bandwidth: bool) -> int:
    """Return the divisor of every bucket length, so that ``group_size`` ranks get equal shares."""
    unit = group_size * BUCKET_ALIGNMENT
    return lcm(unit, HIGH_BUS_BANDWIDTH_ALIGNMENT) if for_high_bus_bandwidth else unit


def target_bucket_size(
    *,
    asked: int | None,
    num_buckets: int | None,
    total_numel: int,
    group_size: int,
    is_overlapped: bool,
) -> int | None:
    """Return the number of elements at which a bucket closes; None means one bucket.

    Without overlap several buckets only add latency.  The default grows with the group, since the
    latency of a ring collective is proportional to the number of ranks.
    """
    if not is_overlapped:
        return None
    if num_buckets is not None:
        return -(-total_numel // num_buckets)
    return max(40_000_000, 1_000_000 * group_size) if asked is None else asked


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
