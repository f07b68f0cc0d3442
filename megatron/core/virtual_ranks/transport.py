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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

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


@dataclass(frozen=True)
class _Part:
    """Tensors that one rank passes to a collective.

    ``reads``: one input for each rank of the group, or a single one for all.  ``writes``: rank of
    the group -> output that receives the input of that rank.
    """

    reads: Tensors
    writes: Mapping[int, Tensor]


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

    meetings: defaultdict[int, _Meeting] = field(default_factory=lambda: defaultdict(_Meeting))
    # Verb, (source, destination) -> transfers that have no counterpart yet.
    transfers: defaultdict[tuple[str, tuple[int, int]], deque[_Transfer]] = field(
        default_factory=lambda: defaultdict(deque)
    )


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
        self._me = rank
        self._ranks = ranks
        self._calls = 0

    def getBackendName(self) -> str:  # noqa: N802  (torch's name)
        """Return ``virtual``."""
        return BACKEND

    # -- collectives ------------------------------------------------------------------------

    def barrier(self, opts: object = None) -> VirtualWork:
        return self._meet("barrier", [_Part((), {})])

    def allreduce(self, tensors: Tensors, opts: Any) -> VirtualWork:
        return self._meet("all_reduce", [_Part([t], {0: t}) for t in tensors], opts)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Tensors, opts: Any) -> VirtualWork:
        root = opts.rootRank
        part = _Part(tensors, {0: tensors[0]} if self._me == root else {})
        return self._meet("reduce", [part], opts, f" to rank {self._ranks[root]}")

    def broadcast(self, tensors: Tensors, opts: Any) -> VirtualWork:
        root = opts.rootRank
        parts = [_Part([t], {} if self._me == root else {root: t}) for t in tensors]
        return self._meet(f"broadcast from rank {self._ranks[root]}", parts)

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> VirtualWork:
        root = opts.rootRank
        part = _Part(inputs[0] if self._me == root else (), {root: outputs[0]})
        return self._meet(f"scatter from rank {self._ranks[root]}", [part])

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> VirtualWork:
        root = opts.rootRank
        part = _Part(inputs, dict(enumerate(outputs[0] if self._me == root else ())))
        return self._meet(f"gather to rank {self._ranks[root]}", [part])

    def allgather(
        self, outputs: Sequence[Tensors], inputs: Tensors, opts: object = None
    ) -> VirtualWork:
        parts = [_Part([i], dict(enumerate(o))) for o, i in zip(outputs, inputs, strict=True)]
        return self._meet("all_gather", parts)

    def all_gather_single(self, output: Tensor, input_: Tensor, opts: object = None) -> VirtualWork:
        return self.all_gather_single_coalesced([output], [input_], opts)

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: object = None
    ) -> VirtualWork:
        return self.allgather([self._chunks(o) for o in outputs], [i.view(-1) for i in inputs])

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> VirtualWork:
        parts = [_Part(i, {0: o}) for o, i in zip(outputs, inputs, strict=True)]
        return self._meet("reduce_scatter", parts, opts)

    def reduce_scatter_single(self, output: Tensor, input_: Tensor, opts: Any) -> VirtualWork:
        return self.reduce_scatter_single_coalesced([output], [input_], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any
    ) -> VirtualWork:
        chunks = [self._chunks(i) for i in inputs]
        return self.reduce_scatter([o.view(-1) for o in outputs], chunks, opts)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: object = None) -> VirtualWork:
        copies = [i.detach().clone() for i in inputs]  # the outputs may overlap with the inputs
        return self._meet("all_to_all", [_Part(copies, dict(enumerate(outputs)))])

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

        return self.alltoall(pieces(output, output_split_sizes), pieces(input_, input_split_sizes))

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
        self, name: str, parts: Sequence[_Part], opts: Any = None, to: str = ""
    ) -> VirtualWork:
        """Join the next collectives of the group, one for each of ``parts``.

        ``opts`` has the operation of a reduction.  The last rank to join performs the collective.
        """
        op: _Operation | None = None
        if opts is not None:
            op = opts.reduceOp.op
            name += f"({str(op).rpartition('.')[2]}){to}"
        begun = []
        for part in parts:
            self._calls += 1
            meeting = self._channel.meetings[self._calls]
            meeting.parts[self._me] = part
            meeting.asked[self._me] = name
            if len(meeting.parts) == self.size():
                asked = [f"rank {self._ranks[r]} {n}" for r, n in sorted(meeting.asked.items())]
                if len(set(meeting.asked.values())) > 1:
                    raise RuntimeError(
                        f"{self.group_desc}, call {self._calls}: the ranks ask for different "
                        f"things: {'; '.join(asked)}"
                    )
                _perform([meeting.parts[r] for r in range(self.size())], op, name)
                meeting.is_done = True
                del self._channel.meetings[self._calls]
            begun.append(meeting)
        tensors = [t for part in parts for t in (*part.reads, *part.writes.values())[:1]]

        def doing() -> str:
            missing = [
                self._ranks[rank]
                for rank in range(self.size())
                if any(not m.is_done and rank not in m.parts for m in begun)
            ]
            shapes = ", ".join(map(_shape, tensors))
            return f"{self.group_desc} {name} {shapes}, call {self._calls}, without {missing}"

        return VirtualWork(self._baton, begun, doing)

    # -- send and receive -------------------------------------------------------------------

    def send(self, tensors: Tensors, to: int, tag: int) -> VirtualWork:
        return self._transfer("send", "recv", (self._me, to), _Transfer(tensors[0], tag))

    def recv(self, tensors: Tensors, source: int, tag: int) -> VirtualWork:
        return self._transfer("recv", "send", (source, self._me), _Transfer(tensors[0], tag))

    def _transfer(
        self, verb: str, counterpart: str, ends: tuple[int, int], mine: _Transfer
    ) -> VirtualWork:
        path = f"{self._ranks[ends[0]]}->{self._ranks[ends[1]]}"
        transfers = self._channel.transfers
        if waiting := transfers[counterpart, ends]:
            other = waiting.popleft()
            sent, received = (mine, other) if verb == "send" else (other, mine)
            if sent.tag != received.tag:
                raise RuntimeError(
                    f"{self.group_desc} {path}: tag {sent.tag} meets a receive of {received.tag}"
                )
            _copy(received.tensor, sent.tensor, f"{self.group_desc} {path}")
            sent.is_done = received.is_done = True
        else:
            transfers[verb, ends].append(mine)
        purpose = next(collective_tracer.record.purposes, None)
        about = "" if purpose is None else f", {purpose}"
        return VirtualWork(
            self._baton,
            [mine],
            lambda: f"{self.group_desc} {verb} {path} {_shape(mine.tensor)}, tag {mine.tag}{about}",
        )


def _perform(parts: Sequence[_Part], op: _Operation | None, name: str) -> None:
    """Perform a collective, given the parts of all ranks; ``op``: reduce the inputs with it."""
    if op is not None:
        inputs = zip(*(part.reads for part in parts), strict=True)
        totals = [_reduced(tensors, op) for tensors in inputs]
        parts = [_Part(totals, part.writes) for part in parts]
    for rank, part in enumerate(parts):
        for source, target in part.writes.items():
            reads = parts[source].reads
            _copy(target, reads[rank % len(reads)], name)


@torch.no_grad()
def _reduced(tensors: Tensors, op: _Operation) -> Tensor:
    """Reduce the tensors one after another, in rank order."""
    result = tensors[0].clone()
    for tensor in tensors[1:]:
        if tensor.shape != result.shape or tensor.dtype != result.dtype:
            raise RuntimeError(f"reduction of {_shape(result)} with {_shape(tensor)}")
        result = _ONE_WITH_ANOTHER[op](result, tensor)
    return result.div_(len(tensors)) if op == dist.ReduceOp.AVG else result


def _copy(target: Tensor, source: Tensor, what: str) -> None:
    """Copy ``source`` to ``target`` without recording it in autograd, as NCCL does."""
    if target.numel() != source.numel() or target.dtype != source.dtype:
        raise RuntimeError(f"{what}: {_shape(source)} for {_shape(target)}")
    target.data.copy_(source.detach().reshape(target.shape))


def _shape(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


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
