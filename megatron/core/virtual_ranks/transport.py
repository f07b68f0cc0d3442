"""Backend ``virtual`` of torch.distributed: collectives between virtual ranks (threads).

The last rank to join a collective performs it for all ranks.  Reductions go through the ranks in
order.  Sends and receives between two ranks match in the order in which they start, and a send
completes when its receive has started: nothing is buffered, so an order that can hang NCCL also
hangs this backend.  If the ranks of a collective call different operations, or with different
shapes or dtypes, RuntimeError reports the calls.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _DistributedBackendOptions

from megatron.core import device
from megatron.core.diagnostics import collective_tracer
from megatron.core.virtual_ranks import BACKEND

if TYPE_CHECKING:
    from megatron.core.virtual_ranks.threads import Baton

Tensors = Sequence[Tensor]
_Operation = dist.ReduceOp.RedOpType
_ONE_WITH_ANOTHER: dict[_Operation, Callable[[Tensor, Tensor], Tensor]] = {
    dist.ReduceOp.SUM: Tensor.add_,
    dist.ReduceOp.AVG: Tensor.add_,
    dist.ReduceOp.PRODUCT: Tensor.mul_,
    dist.ReduceOp.MIN: lambda a, b: torch.minimum(a, b, out=a),
    dist.ReduceOp.MAX: lambda a, b: torch.maximum(a, b, out=a),
    dist.ReduceOp.BAND: Tensor.bitwise_and_,
    dist.ReduceOp.BOR: Tensor.bitwise_or_,
    dist.ReduceOp.BXOR: Tensor.bitwise_xor_,
}


class _Reduces(Protocol):
    """Options that torch passes to a reduction."""

    reduceOp: dist.ReduceOp


@dataclass(frozen=True)
class _Part:
    """Tensors that one rank passes to a collective: inputs (``reads``), outputs (``writes``).

    If there are several, one for each rank of the group.
    """

    reads: Tensors
    writes: Tensors


@dataclass
class _Meeting:
    """One collective of one group that some ranks have not joined yet."""

    parts: dict[int, _Part] = field(default_factory=dict)
    asked: dict[int, str] = field(default_factory=dict)
    is_done: bool = False


@dataclass
class _Transfer:
    tensor: Tensor
    tag: int
    is_done: bool = False


@dataclass
class _Channel:
    """State that the members of one group share: open collectives, sends and receives."""

    meetings: dict[int, _Meeting] = field(default_factory=dict)
    sends: dict[tuple[int, int], deque[_Transfer]] = field(default_factory=dict)
    receives: dict[tuple[int, int], deque[_Transfer]] = field(default_factory=dict)


@dataclass(frozen=True)
class VirtualWork:
    """Handle of started operations, with the interface of torch's Work."""

    baton: Baton
    begun: Sequence[_Meeting | _Transfer]
    doing: Callable[[], str]

    def wait(self, timeout: object = None) -> bool:
        """Let other ranks run until the operations are complete.

        Ignores ``timeout``: `Baton.wait_until` detects deadlocks instead.
        """
        del timeout
        began_s = time.perf_counter()
        self.baton.wait_until(lambda: all(item.is_done for item in self.begun), self.doing)
        collective_tracer.record.waited_s += time.perf_counter() - began_s
        return True


class VirtualGroup(dist.ProcessGroup):
    """Process group with the methods that torch.distributed calls, of torch 2.11 to 2.13."""

    def __init__(self, baton: Baton, channel: _Channel, rank: int, ranks: Sequence[int]) -> None:
        super().__init__(rank, len(ranks))
        self._baton = baton
        self._channel = channel
        self._me, self._ranks = rank, ranks
        self._calls = 0

    def getBackendName(self) -> str:  # noqa: N802  (torch's name)
        """Return ``virtual``."""
        return BACKEND

    # -- collectives ------------------------------------------------------------------------

    def barrier(self, opts: object = None) -> VirtualWork:
        return self._meet("barrier", [_Part((), ())], _each_to_each)

    def allreduce(self, tensors: Tensors, opts: _Reduces) -> VirtualWork:
        op = _op_of(opts)
        parts = [_Part([t], [t]) for t in tensors]
        return self._meet(_named("all_reduce", op), parts, lambda all_: _sum_for_all(all_, op))

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Tensors, opts: dist.ReduceOptions) -> VirtualWork:
        op, root = _op_of(opts), opts.rootRank
        writes = tensors if self._me == root else ()
        name = f"{_named('reduce', op)} to rank {self._ranks[root]}"
        return self._meet(name, [_Part(tensors, writes)], lambda all_: _sum_for_all(all_, op))

    def broadcast(self, tensors: Tensors, opts: dist.BroadcastOptions) -> VirtualWork:
        root, n = opts.rootRank, self.size()
        parts = [_Part([t] * n, ()) if self._me == root else _Part((), [t]) for t in tensors]
        return self._meet(f"broadcast from rank {self._ranks[root]}", parts, _from_one(root))

    def scatter(
        self, outputs: Tensors, inputs: Sequence[Tensors], opts: dist.ScatterOptions
    ) -> VirtualWork:
        root = opts.rootRank
        part = _Part(inputs[0] if self._me == root else (), outputs)
        return self._meet(f"scatter from rank {self._ranks[root]}", [part], _from_one(root))

    def gather(
        self, outputs: Sequence[Tensors], inputs: Tensors, opts: dist.GatherOptions
    ) -> VirtualWork:
        root = opts.rootRank
        part = _Part(inputs, outputs[0] if self._me == root else ())
        return self._meet(f"gather to rank {self._ranks[root]}", [part], _first_to_each)

    def allgather(
        self, outputs: Sequence[Tensors], inputs: Tensors, opts: object = None
    ) -> VirtualWork:
        parts = [_Part([i], o) for o, i in zip(outputs, inputs, strict=True)]
        return self._meet("all_gather", parts, _first_to_each)

    def all_gather_single(self, output: Tensor, input_: Tensor, opts: object = None) -> VirtualWork:
        return self.all_gather_single_coalesced([output], [input_], opts)

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: object = None
    ) -> VirtualWork:
        return self.allgather(
            [self._chunks(o) for o in outputs], [i.view(-1) for i in inputs], opts
        )

    def reduce_scatter(
        self, outputs: Tensors, inputs: Sequence[Tensors], opts: _Reduces
    ) -> VirtualWork:
        op = _op_of(opts)
        parts = [_Part(i, [o]) for o, i in zip(outputs, inputs, strict=True)]
        return self._meet(_named("reduce_scatter", op), parts, lambda all_: _sum_of_each(all_, op))

    def reduce_scatter_single(self, output: Tensor, input_: Tensor, opts: _Reduces) -> VirtualWork:
        return self.reduce_scatter_single_coalesced([output], [input_], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: _Reduces
    ) -> VirtualWork:
        chunks = [self._chunks(i) for i in inputs]
        return self.reduce_scatter([o.view(-1) for o in outputs], chunks, opts)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: object = None) -> VirtualWork:
        return self._meet("all_to_all", [_Part(inputs, outputs)], _each_to_each)

    def all_to_all_single(
        self,
        output: Tensor,
        input_: Tensor,
        output_split_sizes: Sequence[int] | None,
        input_split_sizes: Sequence[int] | None,
        opts: object = None,
    ) -> VirtualWork:
        def pieces(tensor: Tensor, sizes: Sequence[int] | None) -> Tensors:
            rows = list(sizes or [len(tensor) // self.size()] * self.size())
            if sum(rows) != len(tensor):
                raise RuntimeError(f"all_to_all: {len(tensor)} rows for splits of {rows}")
            return torch.split(tensor, rows)

        return self.alltoall(
            pieces(output, output_split_sizes), pieces(input_, input_split_sizes), opts
        )

    _allgather_base = all_gather_single  # names before torch 2.13
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _chunks(self, tensor: Tensor) -> Tensors:
        """Split a contiguous tensor into equal flat parts, one for each rank."""
        if tensor.numel() % self.size() or not tensor.is_contiguous():
            raise RuntimeError(f"{_shape(tensor)} is not {self.size()} equal contiguous parts")
        return tensor.view(self.size(), -1).unbind()

    def _meet(
        self, name: str, parts: Sequence[_Part], carry_out: Callable[[Sequence[_Part]], None]
    ) -> VirtualWork:
        """Join the next collectives of the group, one for each of ``parts``.

        ``carry_out`` performs a collective, given the parts of all ranks in rank order; the last
        rank to join calls it.
        """
        begun = []
        for part in parts:
            number, self._calls = self._calls, self._calls + 1
            meeting = self._channel.meetings.setdefault(number, _Meeting())
            meeting.parts[self._me], meeting.asked[self._me] = part, name
            if len(meeting.parts) == self.size():
                self._require_one_operation(meeting, number)
                with torch.no_grad():
                    carry_out([meeting.parts[r] for r in range(self.size())])
                meeting.is_done = True
                del self._channel.meetings[number]
            begun.append(meeting)
        shapes = ", ".join(_shape(t) for part in parts for t in part.reads[:1] or part.writes[:1])

        def doing() -> str:
            missing = [
                self._ranks[rank]
                for rank in range(self.size())
                if any(not m.is_done and rank not in m.parts for m in begun)
            ]
            return f"{self.group_desc} {name} {shapes}, call {self._calls}, without {missing}"

        return VirtualWork(self._baton, begun, doing)

    def _require_one_operation(self, meeting: _Meeting, number: int) -> None:
        if len(set(meeting.asked.values())) > 1:
            asked = [f"rank {self._ranks[r]} {name}" for r, name in sorted(meeting.asked.items())]
            raise RuntimeError(
                f"{self.group_desc}, call {number + 1}: the ranks ask for different things: "
                f"{'; '.join(asked)}"
            )

    # -- send and receive -------------------------------------------------------------------

    def send(self, tensors: Tensors, to: int, tag: int) -> VirtualWork:
        return self._transfer("send", (self._me, to), tensors[0], tag)

    def recv(self, tensors: Tensors, source: int, tag: int) -> VirtualWork:
        return self._transfer("recv", (source, self._me), tensors[0], tag)

    def _transfer(self, verb: str, ends: tuple[int, int], tensor: Tensor, tag: int) -> VirtualWork:
        mine = _Transfer(tensor, tag)
        sends = self._channel.sends.setdefault(ends, deque())
        receives = self._channel.receives.setdefault(ends, deque())
        (sends if verb == "send" else receives).append(mine)
        path = f"{self._ranks[ends[0]]}->{self._ranks[ends[1]]}"
        if sends and receives:
            sent, received = sends.popleft(), receives.popleft()
            if sent.tag != received.tag:
                raise RuntimeError(
                    f"{self.group_desc} {path}: tag {sent.tag} meets a receive of {received.tag}"
                )
            with torch.no_grad():
                _copy(received.tensor, sent.tensor, f"{self.group_desc} {path}")
            sent.is_done = received.is_done = True

        purpose = next(collective_tracer.record.purposes, None)
        about = "" if purpose is None else f", {purpose}"

        def doing() -> str:
            return f"{self.group_desc} {verb} {path} {_shape(tensor)}, tag {tag}{about}"

        return VirtualWork(self._baton, [mine], doing)


# -- perform a collective, given the parts of all ranks -----------------------------------------


def _sum_for_all(parts: Sequence[_Part], op: _Operation) -> None:
    total = _reduced([part.reads[0] for part in parts], op)
    for part in parts:
        for target in part.writes:
            _copy(target, total, "all_reduce")


def _sum_of_each(parts: Sequence[_Part], op: _Operation) -> None:
    totals = [_reduced([p.reads[rank] for p in parts], op) for rank in range(len(parts))]
    for part, total in zip(parts, totals, strict=True):
        _copy(part.writes[0], total, "reduce_scatter")


def _from_one(root: int) -> Callable[[Sequence[_Part]], None]:
    def carry_out(parts: Sequence[_Part]) -> None:
        for rank, part in enumerate(parts):
            for target in part.writes:
                _copy(target, parts[root].reads[rank], f"from {root} to {rank} of the group")

    return carry_out


def _first_to_each(parts: Sequence[_Part]) -> None:
    for part in parts:
        for source, target in zip(parts, part.writes, strict=False):
            _copy(target, source.reads[0], "all_gather")


def _each_to_each(parts: Sequence[_Part]) -> None:
    pieces = [[piece.clone() for piece in part.reads] for part in parts]
    for rank, part in enumerate(parts):
        for source, target in zip(pieces, part.writes, strict=False):
            _copy(target, source[rank], "all_to_all")


def _reduced(tensors: Tensors, op: _Operation) -> Tensor:
    """Reduce the tensors one after another, in rank order."""
    join = _ONE_WITH_ANOTHER[op]
    result = tensors[0].detach().clone()
    for tensor in tensors[1:]:
        if tensor.shape != result.shape or tensor.dtype != result.dtype:
            raise RuntimeError(f"reduction of {_shape(result)} with {_shape(tensor)}")
        result = join(result, tensor.detach())
    return result.div_(len(tensors)) if op == dist.ReduceOp.AVG else result


def _copy(target: Tensor, source: Tensor, what: str) -> None:
    """Copy ``source`` to ``target`` without recording it in autograd, as NCCL does."""
    if target.numel() != source.numel() or target.dtype != source.dtype:
        raise RuntimeError(f"{what}: {_shape(source)} for {_shape(target)}")
    target.data.copy_(source.detach().reshape(target.shape))


def _shape(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _op_of(opts: _Reduces) -> _Operation:
    op: _Operation = opts.reduceOp.op  # type: ignore[attr-defined]  # missing in torch's stub
    return op


def _named(name: str, op: _Operation) -> str:
    return f"{name}({str(op).rpartition('.')[2]})"


# -- creation of groups by torch ----------------------------------------------------------------

# The scheduler of this run, and the channel of each group by torch's name.
_network: tuple[Baton, defaultdict[str, _Channel]] | None = None


@contextlib.contextmanager
def network_of(baton: Baton) -> Iterator[None]:
    """Make groups of the backend ``virtual`` that are created in the context use ``baton``."""
    global _network
    _network = baton, defaultdict(_Channel)
    try:
        yield
    finally:
        _network = None


def _make_group(options: _DistributedBackendOptions, _more: object) -> VirtualGroup:
    assert _network is not None, "the back end 'virtual' is for virtual ranks alone"
    ranks = options.global_ranks_in_group or range(options.group_size)
    baton, channels = _network
    return VirtualGroup(baton, channels[options.group_id], options.group_rank, ranks)


dist.Backend.register_backend(BACKEND, _make_group, extended_api=True, devices=[device.CPU])
