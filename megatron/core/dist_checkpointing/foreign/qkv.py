"""Rows of query, key and value as checkpoints before version 3 arrange them."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.dist_checkpointing.foreign.archive import StoredArray


def in_our_order(
    array: StoredArray, version: float, heads: int
) -> Iterator[tuple[int, StoredArray]]:
    """(row of ours, rows as stored) of a rank's share of ``heads`` heads.

    Ours: per head its query, key and value rows.  Version 0 has all queries, then all keys, then
    all values; version 1 the three side by side in every row of a head.
    """
    if version >= 2:
        yield 0, array
        return
    width = array.shape[0] // (3 * heads)
    step = array.stride[0]
    for head in range(heads):
        for kind in range(3):
            first = (kind * heads + head) * width if version < 1 else head * width * 3 + kind
            rows = array.narrow(slice(first, first + width))
            if version >= 1:
                rows = rows.with_stride(3 * step, *array.stride[1:])
            yield (head * 3 + kind) * width, rows
