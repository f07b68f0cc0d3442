"""Which part of a buffer, and of which parameters, a data-parallel rank owns.

Pure arithmetic in elements.  Every bucket is cut into equal shares, one a rank, so a rank's part of
the buffer is not contiguous: it is what reduce-scatter leaves there bucket by bucket.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.core.distributed.buckets import Bucket, BufferLayout


@dataclass(frozen=True)
class OwnedPart:
    """Elements ``start`` to ``stop`` of parameter ``param``, flattened row by row."""

    param: int  # index in model order
    start: int
    stop: int


def share_of_bucket(bucket: Bucket, rank: int, size: int) -> tuple[int, int]:
    """The stretch of the buffer that ``rank`` of ``size`` owns in ``bucket``.

    >>> share_of_bucket(Bucket(8, 16, (0,)), rank=1, size=2)
    (12, 16)
    """
    share = (bucket.stop - bucket.start) // size
    return bucket.start + rank * share, bucket.start + (rank + 1) * share


def owned_parts(layout: BufferLayout, rank: int, size: int) -> Iterator[OwnedPart]:
    """What ``rank`` of ``size`` owns: at most one part of a parameter, in the buffer's order.

    Padding belongs to no part.  A rank may own nothing of a parameter, or nothing at all.
    """
    for bucket in layout.buckets:
        low, high = share_of_bucket(bucket, rank, size)
        for param in bucket.params:
            begin, end = layout.spans[param]
            start, stop = max(low, begin), min(high, end)
            if start < stop:
                yield OwnedPart(param, start - begin, stop - begin)
