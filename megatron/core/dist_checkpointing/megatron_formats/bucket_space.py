"""Read optimizer state that Megatron-LM saved bucket by bucket (``fully_sharded_bucket_space``).

In format torch_dist each bucket of a buffer, padding included, is one flat tensor over the
data-parallel ranks:

    {group}gbuf_idx_{b}.dtype_({param dtype}, {grad dtype}).bucket_idx_{n}.{kind}

``group``: ``optimizer.distributed.dp_group_idx_{g}.``; ``kind``: param, exp_avg, exp_avg_sq.  The
object ``{group}per_bucket_numel_unpadded`` is a list with one dictionary for each buffer, from
(param dtype, grad dtype) to the number of elements of each bucket.  No such file of Megatron-LM was
available: the format is inferred from public descriptions of core_v0.14.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.core.config.errors import CheckpointDamaged, CheckpointError
from megatron.core.dist_checkpointing.megatron_formats.archive import ArrayView
from megatron.core.dist_checkpointing.megatron_formats.dcp_index import DcpIndex, DcpTensor

_GROUP = r"(?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_(\d+)\."
_BUCKET = re.compile(_GROUP + r"gbuf_idx_(\d+)\.dtype_\((.+)\)\.bucket_idx_(\d+)\.(\w+)")
_SIZES = re.compile(_GROUP + r"per_bucket_numel_unpadded(?:/|$)")

Dtypes = tuple[torch.dtype, ...]  # (dtype of the parameters, dtype of their gradients)
Buffers = dict[int, dict[Dtypes, dict[str, ArrayView]]]  # as in distrib_optim.pt of format torch


class ArrayPart(NamedTuple):
    """Elements ``begin`` to ``end`` of a flat array."""

    begin: int
    end: int
    array: Callable[[], ArrayView]  # flat, ``end - begin`` elements or more


@dataclass(frozen=True)
class JoinedArray(ArrayView):
    """A view of a flat array whose parts are stored in several places."""

    parts: tuple[ArrayPart, ...]

    def _elements(self, count: int) -> Tensor:
        flat, missing = torch.empty(count, dtype=self.dtype), count
        for part in self.parts:
            low, high = max(part.begin, self.offset), min(part.end, self.offset + count)
            if low < high:
                values = part.array().flat(low - part.begin, (high - low,)).read()
                flat[low - self.offset : high - self.offset] = values
                missing -= high - low
        if missing:
            raise CheckpointDamaged(f"{missing} elements of a bucket of the optimizer are missing")
        return flat


def is_bucket(key: str) -> bool:
    """Return whether a tensor of torch_dist is a bucket of the optimizer."""
    return _BUCKET.fullmatch(key) is not None


def read_buckets(index: DcpIndex) -> Iterator[tuple[int, Buffers]]:
    """Yield the number of each data-parallel group, and its buffers without padding."""
    found: dict[int, dict[tuple[int, str, str], dict[int, DcpTensor]]] = {}
    for key, tensor in index.tensors.items():
        if match := _BUCKET.fullmatch(key):
            if key.startswith("chained_1."):
                raise CheckpointError(
                    f"{index.folder}: {key} is the state of experts, saved bucket by bucket, which "
                    "is not read; --no-load-optim does without"
                )
            group, buffer, dtypes, bucket, kind = match.groups()
            buckets = found.setdefault(int(group), {}).setdefault((int(buffer), dtypes, kind), {})
            buckets[int(bucket)] = tensor
    sizes = {int(match[1]): key for key in index.objects if (match := _SIZES.match(key))}
    for group, stored in sorted(found.items()):
        if group not in sizes:
            raise CheckpointDamaged(
                f"{index.folder}: the sizes of the buckets of group {group} are missing"
            )
        (unpadded,) = index.object(sizes[group])  # every object is stored in a list
        yield group, _buffers(stored, unpadded, f"{index.folder}: group {group}")


def _buffers(
    stored: Mapping[tuple[int, str, str], Mapping[int, DcpTensor]],
    unpadded: Sequence[Mapping[Dtypes, Sequence[int]]],
    where: str,
) -> Buffers:
    buffers: Buffers = {}
    for (number, dtypes, kind), buckets in sorted(stored.items()):
        try:
            sizes = {str(key): (key, value) for key, value in unpadded[number].items()}
            key, lengths = sizes[f"({dtypes})"]
        except (IndexError, KeyError, AttributeError):
            raise CheckpointDamaged(f"{where}: no sizes for buffer {number} of {dtypes}") from None
        if sorted(buckets) != list(range(len(lengths))):
            raise CheckpointDamaged(
                f"{where}: buckets {sorted(buckets)} of buffer {number}, {len(lengths)} were saved"
            )
        joined = _joined([buckets[i] for i in range(len(lengths))], lengths)
        buffers.setdefault(number, {}).setdefault(key, {})[kind] = joined
    return buffers


def _joined(buckets: Sequence[DcpTensor], lengths: Sequence[int]) -> JoinedArray:
    """Concatenate the buckets, each without its padding."""
    parts: list[ArrayPart] = []
    done = 0
    for tensor, length in zip(buckets, lengths, strict=True):
        per_rank = tensor.shape[-1]
        for chunk in tensor.chunks:
            first = chunk.offset[-1] + per_rank * (chunk.offset[0] if len(tensor.shape) > 1 else 0)
            last = min(first + chunk.shape[-1], length)
            if first < last:
                parts.append(ArrayPart(done + first, done + last, chunk.array))
        done += length
    return JoinedArray(buckets[0].dtype, 0, (done,), (1,), tuple(parts))
