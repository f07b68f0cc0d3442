"""Contiguous parameters, gathered from the ranks that update them bucket by bucket.

``param.data`` becomes a view of the buffer.  After an update a rank's buffer is new in the shares
that the rank owns, and old elsewhere until `ParamGather` has run.

Collectives: one all-gather per bucket over the bucket's group, always in the order of
`ParamGather.buckets`, whatever a rank's forward pass needs first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron.core.collectives import all_gather_single
from megatron.core.distributed.buckets import BufferLayout


class ParamBucket:
    """A stretch of the buffer that one collective gathers."""

    def __init__(self, data: Tensor, params: Sequence[nn.Parameter], group: ProcessGroup) -> None:
        self.data = data
        self.params = tuple(params)
        self.group = group
        self._work: Any = None

    def start(self) -> None:
        """Start the all-gather of everybody's share."""
        size = self.group.size()
        if size > 1:
            share = self.data.view(size, -1)[self.group.rank()]
            self._work = all_gather_single(self.data, share, group=self.group, async_op=True)

    def finish(self) -> None:
        """Wait until all shares are here; copies that are made of weights go by their versions."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        torch.autograd.graph.increment_version(self.params)


class ParamBuffer:
    """``params`` in one tensor, cut into ``buckets``; padding is zero."""

    @torch.no_grad()
    def __init__(
        self, params: Sequence[nn.Parameter], layout: BufferLayout, group: ProcessGroup
    ) -> None:
        first = params[0]
        self.data = torch.zeros(layout.numel, dtype=first.dtype, device=first.device)
        for param, (start, stop) in zip(params, layout.spans, strict=True):
            place = self.data[start:stop].view(param.shape)
            place.copy_(param)
            param.data = place
        self.buckets = [
            ParamBucket(self.data[b.start : b.stop], [params[i] for i in b.params], group)
            for b in layout.buckets
        ]


class ParamGather:
    """Gathers buckets in the order in which a forward pass meets them, one ahead of the need."""

    def __init__(self, buckets: Sequence[ParamBucket]) -> None:
        self.buckets = tuple(buckets)
        self._started = self._finished = len(self.buckets)

    def begin(self) -> None:
        """This rank has updated its shares: whatever was gathered is old."""
        assert self._finished == len(self.buckets), "parameters are updated while they are gathered"
        self._started = self._finished = 0

    def start(self, count: int) -> None:
        """See to it that the first ``count`` buckets are under way."""
        while self._started < min(count, len(self.buckets)):
            self.buckets[self._started].start()
            self._started += 1

    def finish(self, count: int | None = None) -> None:
        """Wait for the first ``count`` buckets (None: for all), with the one after them begun."""
        count = len(self.buckets) if count is None else count
        if self._finished >= count:
            return
        self.start(count + 1)
        while self._finished < count:
            self.buckets[self._finished].finish()
            self._finished += 1
