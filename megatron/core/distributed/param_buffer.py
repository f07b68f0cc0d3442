"""Contiguous parameter buffers of the distributed optimizer, all-gathered bucket by bucket.

``param.data`` becomes a view of the buffer.  After an update, a rank's buffer holds new values only
in the shares that this rank owns; the rest is stale until `ParamGather` has gathered it.

Collectives: one all-gather per bucket over the bucket's group, always in the order of
`ParamGather.buckets`, whichever bucket a rank's forward pass needs first.  For weights stored as
8-bit codes, each all-gather follows all-reduces (MAX) of the weights' largest magnitudes: over the
bucket's group, then over the tensor-parallel ranks that hold the other shards of the same weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron.core.distributed.buffer_plan import BufferLayout
from megatron.core.low_precision import E4M3, Scaled, codes_of, largest, power_of_two
from megatron.core.parallel.collectives import all_gather_single, all_reduce_over
from megatron.core.params.param_info import info_of


@dataclass(frozen=True)
class GatheredCodes:
    """e4m3 codes that a layer passes to its GEMM; valid while the weight has this version."""

    scaled: Scaled
    version: int


class ParamBucket:
    """A contiguous range of the buffer that one all-gather completes."""

    def __init__(self, data: Tensor, params: Sequence[nn.Parameter], group: ProcessGroup) -> None:
        self.data = data
        self.params = tuple(params)
        self.group = group
        self.keeps_values = True  # False (codes only): values are freed between updates
        self._work: dist.Work | None = None

    def start(self) -> None:
        """Start the all-gather of the ranks' shares.  Collective over the bucket's group."""
        size = self.group.size()
        if size > 1:
            # In place: the input is this rank's slice of the output.
            share = self.data.view(size, -1)[self.group.rank()]
            self._work = all_gather_single(self.data, share, group=self.group, async_op=True)

    def finish(self) -> None:
        """Wait for the all-gather and mark the parameters as changed."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        # Autograd does not see the collective's write.  Caches derived from a weight (for example
        # its fp8 copy) compare the version to notice the change.
        torch.autograd.graph.increment_version(self.params)

    def prepare_update(self) -> None:
        """Allocate memory for the values, before the optimizer writes this rank's share."""

    def restore_values(self) -> None:
        """Make ``data`` hold the values of all parameters, for readers other than layers."""


class CodesBucket(ParamBucket):
    """Bucket of weights that are gathered as e4m3 codes, which layers pass to their GEMMs.

    Codes take one byte per element; a layer uses them without conversion.

    Each weight has one scale, a power of two.  ``spans`` are the parameters' ranges in the bucket.

    Lifetime: memory for values exists from `prepare_update` to `start`, while this rank writes its
    share, and from `restore_values` to the next `start`; with ``keeps_values`` always.  Otherwise
    a parameter is an expanded NaN scalar that takes no memory, so that a reader that forgot
    `restore_values` computes NaN instead of using stale values.  Codes are overwritten in place and
    keep their addresses.
    """

    def __init__(
        self,
        data: Tensor,
        params: Sequence[nn.Parameter],
        group: ProcessGroup,
        spans: Sequence[tuple[int, int]],
        weight_group: ProcessGroup,
    ) -> None:
        super().__init__(data, params, group)
        self.spans = tuple(spans)
        self.weight_group = weight_group
        self.keeps_values = False
        self._scales: list[Tensor] = []
        self._codes = torch.empty(len(data), dtype=torch.uint8, device=data.device)
        self._no_value = data.new_full((), torch.nan)
        self._has_memory = self._has_values = True

    def prepare_update(self) -> None:
        if not self._has_memory:
            self._has_memory = True
            self.data = self._no_value.new_empty(len(self._codes))
            for param, (a, b) in zip(self.params, self.spans, strict=True):
                param.data = self.data[a:b].view(param.shape)

    @torch.no_grad()
    def start(self) -> None:
        rank = self.group.rank()
        size = self.group.size()
        share = len(self.data) // size
        begin = rank * share
        mine = [(max(a, begin), min(b, begin + share)) for a, b in self.spans]
        parts = [self.data[a:b] if a < b else self.data[:0] for a, b in mine]
        amax = torch.stack([largest(part) for part in parts])
        # Several ranks hold parts of a weight: shares over the bucket's group, tensor-parallel
        # shards over the weight group.  All of them must use the same scale.
        all_reduce_over(amax, self.group, self.weight_group, op=dist.ReduceOp.MAX)
        self._scales = list(power_of_two(amax, E4M3.largest).unbind())
        codes = torch.zeros(share, dtype=E4M3.dtype, device=self.data.device)
        for part, (a, b), scale in zip(parts, mine, self._scales, strict=True):
            if a < b:
                codes[a - begin : b - begin] = codes_of(part.float(), E4M3, scale)
        if size == 1:
            self._codes.copy_(codes.view(torch.uint8))
        else:
            self._work = all_gather_single(
                self._codes, codes.view(torch.uint8), group=self.group, async_op=True
            )
        self._has_values = False
        if not self.keeps_values:
            self._has_memory = False
            self.data = self._no_value
            for param in self.params:
                param.data = self._no_value.expand(param.shape)

    def finish(self) -> None:
        super().finish()
        codes = self._codes.view(E4M3.dtype)
        for param, (a, b), scale in zip(self.params, self.spans, self._scales, strict=True):
            scaled = Scaled(codes[a:b].view(param.shape), scale)
            param.gathered_codes = GatheredCodes(scaled, param._version)  # type: ignore[attr-defined]
        if self.keeps_values:
            self.restore_values()

    @torch.no_grad()
    def restore_values(self) -> None:
        if self._has_values:
            return
        self.prepare_update()
        codes = self._codes.view(E4M3.dtype)
        for (a, b), scale in zip(self.spans, self._scales, strict=True):
            self.data[a:b] = codes[a:b].float() * scale
        self._has_values = True


@torch.no_grad()
def make_param_buckets(
    params: Sequence[nn.Parameter],
    layout: BufferLayout,
    group: ProcessGroup,
    weight_group: ProcessGroup,
) -> tuple[Tensor | None, list[ParamBucket]]:
    """Move the values of ``params`` into one tensor, split into buckets; padding is zero.

    Returns the tensor and the buckets.  A `CodesBucket` has a tensor of its own, so that its values
    can be freed separately.
    ``weight_group``: the tensor-parallel ranks that hold the other shards of such a weight.
    """
    first = params[0]
    zeros = partial(torch.zeros, dtype=first.dtype, device=first.device)
    is_codes = info_of(first).gathered_as_codes
    whole = None if is_codes else zeros(layout.numel)
    buckets: list[ParamBucket] = []
    for bucket in layout.buckets:
        start = bucket.start
        stop = bucket.stop
        data = zeros(stop - start) if whole is None else whole[start:stop]
        held = [params[i] for i in bucket.params]
        spans = [(a - start, b - start) for a, b in (layout.spans[i] for i in bucket.params)]
        for param, (a, b) in zip(held, spans, strict=True):
            place = data[a:b].view(param.shape)
            place.copy_(param)
            param.data = place
        if is_codes:
            buckets.append(CodesBucket(data, held, group, spans, weight_group))
        else:
            buckets.append(ParamBucket(data, held, group))
    return whole, buckets


class ParamGather:
    """All-gather buckets in the order in which a forward pass needs them, prefetching one.

    ``_started`` and ``_finished`` count buckets from the front.  Every rank starts the buckets in
    list order, so the collectives match even if ranks need them in different orders.
    """

    def __init__(self, buckets: Sequence[ParamBucket]) -> None:
        self.buckets = tuple(buckets)
        self._started = self._finished = len(self.buckets)

    @property
    def is_complete(self) -> bool:
        """Whether no all-gather is in progress or waiting to be started."""
        return self._finished == len(self.buckets)

    def begin(self) -> None:
        """Mark all gathered values as stale: this rank has updated its shares."""
        assert self.is_complete, "parameters are updated while they are gathered"
        self._started = self._finished = 0

    def start(self, count: int) -> None:
        """Start the all-gathers of the first ``count`` buckets that are not started yet."""
        while self._started < min(count, len(self.buckets)):
            self.buckets[self._started].start()
            self._started += 1

    def finish(self, count: int | None = None) -> None:
        """Wait for the first ``count`` buckets (None: all), and prefetch the one after them."""
        count = len(self.buckets) if count is None else count
        if self._finished >= count:
            return
        self.start(count + 1)
        while self._finished < count:
            self.buckets[self._finished].finish()
            self._finished += 1
