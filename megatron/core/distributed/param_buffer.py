"""Contiguous parameters, gathered from the ranks that update them bucket by bucket.

``param.data`` becomes a view of the buffer.  After an update a rank's buffer is new in the shares
that the rank owns, and old elsewhere until `ParamGather` has run.

Collectives: one all-gather per bucket over the bucket's group, always in the order of
`ParamGather.buckets`, whatever a rank's forward pass needs first.  Where weights travel as 8-bit
codes, an all-reduce of each one's largest value comes before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron.core.collectives import all_gather_single
from megatron.core.distributed.buckets import BufferLayout
from megatron.core.low_precision import E4M3, codes_of, largest, power_of_two
from megatron.core.param_info import info_of


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


class CodesBucket(ParamBucket):
    """Weights that layers quantise anyway: gathered as e4m3, afterwards everywhere what that means.

    A weight has one scale, a power of two.  A layer that makes codes of what it finds here finds
    these.  ``spans``: where the parameters lie in ``data``.
    """

    def __init__(
        self,
        data: Tensor,
        params: Sequence[nn.Parameter],
        group: ProcessGroup,
        spans: Sequence[tuple[int, int]],
    ) -> None:
        super().__init__(data, params, group)
        self.spans = tuple(spans)
        self._scales: list[Tensor] = []
        self._codes: Tensor | None = None

    @torch.no_grad()
    def start(self) -> None:
        rank, size = self.group.rank(), self.group.size()
        if size == 1:
            return
        share = len(self.data) // size
        begin = rank * share
        mine = [(max(a, begin), min(b, begin + share)) for a, b in self.spans]
        none = self.data[:0]
        parts = [self.data[a:b] if a < b else none for a, b in mine]
        amax = torch.stack([largest(part) for part in parts])
        dist.all_reduce(amax, dist.ReduceOp.MAX, group=self.group)
        self._scales = list(power_of_two(amax, E4M3.largest).unbind())
        codes = torch.zeros(share, dtype=E4M3.dtype, device=self.data.device)
        for part, (a, b), scale in zip(parts, mine, self._scales, strict=True):
            if a < b:
                codes[a - begin : b - begin] = codes_of(part.float(), E4M3, scale)
        self._codes = torch.empty(len(self.data), dtype=torch.uint8, device=self.data.device)
        self._work = all_gather_single(
            self._codes, codes.view(torch.uint8), group=self.group, async_op=True
        )

    @torch.no_grad()
    def finish(self) -> None:
        super().finish()
        if self._codes is not None:
            codes = self._codes.view(E4M3.dtype)
            for (a, b), scale in zip(self.spans, self._scales, strict=True):
                self.data[a:b] = codes[a:b].float() * scale
            self._codes = None


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
        self.buckets: list[ParamBucket] = []
        for bucket in layout.buckets:
            data = self.data[bucket.start : bucket.stop]
            held = [params[i] for i in bucket.params]
            if info_of(first).travels_as_codes:
                spans = [layout.spans[i] for i in bucket.params]
                moved = [(a - bucket.start, b - bucket.start) for a, b in spans]
                self.buckets.append(CodesBucket(data, held, group, moved))
            else:
                self.buckets.append(ParamBucket(data, held, group))


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
