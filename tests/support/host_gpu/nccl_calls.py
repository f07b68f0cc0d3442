"""Check each call of torch.distributed against what NCCL takes, and record it for `nccl_order`.

Emulated from the source of ``ProcessGroupNCCL``: dtypes, reductions, contiguity.  Until `wait`
returns, the output of an asynchronous call holds no result (its bytes are 0xff: NaN), and its
input must not change.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import json
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.utils._python_dispatch import _disable_current_modes

from tests.support.host_gpu.nccl_order import Call, Operation, Part, Wait, check

P2P = ("send", "recv", "isend", "irecv")
COLLECTIVES = (
    *("all_reduce", "reduce", "broadcast", "all_to_all_single", "barrier"),
    *("all_gather", "all_gather_into_tensor", "gather", "reduce_scatter_tensor"),
    *("all_gather_single", "reduce_scatter_single"),  # names of torch 2.13
)
# Argument names of what a call writes; of an in-place operation it reads it as well.
_OUTPUTS = ("tensor_list", "gather_list", "output", "output_tensor")
_IN_PLACE = ("all_reduce", "reduce", "broadcast")
_FLOAT8 = {getattr(torch, n) for n in dir(torch) if n.startswith("float8_e")}
_DTYPES = {
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool),
    *(torch.int8, torch.uint8, torch.int32, torch.int64),
} | _FLOAT8
_REDUCTIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "PREMUL_SUM")
_CALLERS = ("megatron.", "torch.distributed")  # modules whose names `recorded` replaces
_PATIENCE = timedelta(seconds=20)  # for the calls of other ranks, at the end of a run


class Record:
    """The calls of this rank since its default group was created."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.members: dict[str, list[int]] = {}
        self.has_failed = False  # then other ranks may have made more calls than this one
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def add(self, group: Any, form: str, parts: Sequence[Part] = (), *, alone: bool = False) -> int:
        """Record an operation; ``alone``: on the communicator of its two ranks."""
        ranks = dist.get_process_group_ranks(group)
        name = _name(group)
        if alone:
            ranks = sorted((dist.get_rank(), parts[0].peer))
            name = f"{name}, ranks {ranks[0]} and {ranks[1]}"
        with self._lock:
            number = next(self._numbers)
            self.members[name] = ranks
            self.calls.append(Operation(number, name, form, tuple(parts)))
        return number

    def wait(self, number: int) -> None:
        """Record a wait for an operation."""
        with self._lock:
            self.calls.append(Wait(number))


_record = Record()
_thread = threading.local()  # ``is_inside``: torch makes the calls that a call consists of


class Work:
    """A request whose outputs are valid after `wait`."""

    def __init__(
        self,
        works: Sequence[Any],
        number: int,
        outputs: Sequence[tuple[Tensor, Tensor]],
        inputs: Sequence[tuple[Tensor, Tensor]],
        name: str,
    ) -> None:
        self._works = works
        self._number = number
        self._name = name
        self._outputs = outputs
        self._inputs = inputs
        self._is_done = False

    def wait(self, *timeout: Any) -> bool:
        _record.wait(self._number)
        if self._is_done:  # gloo's own request would wait for ever the second time
            return True
        self._is_done = True
        with _noting_failure():
            for work in self._works:
                work.wait(*timeout)
        for tensor, value in self._inputs:
            assert _has_bytes_of(tensor, value), f"{self._name}: input changed before wait()"
        for tensor, value in self._outputs:
            tensor.data.copy_(value)
        self._outputs = self._inputs = ()
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


def checked(collective: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``collective`` with the contract of NCCL."""
    name = collective.__name__
    signature = inspect.signature(collective)

    @functools.wraps(collective)
    def call(*given: Any, **options: Any) -> Any:
        bound = signature.bind(*given, **options)
        bound.apply_defaults()
        values = bound.arguments
        group = values["group"]
        if getattr(_thread, "is_inside", False):
            return collective(*given, **options)
        check_arguments(name, values)
        parts = [_part(name, values)] if name in P2P else []
        form = "" if parts else _form(name, values)
        number = _record.add(group, form, parts, alone=bool(parts))
        is_async = values.get("async_op", False) or name in ("isend", "irecv")
        if not is_async or dist.get_world_size(group) == 1:
            with _noting_failure(), _inside():
                work = collective(*given, **options)
            if is_async:
                return Work([work], number, (), (), name)
            _record.wait(number)
            return work
        return _begun(collective, bound, name, number)

    return call


def batch(operations: Sequence[dist.P2POp], begin: Callable[..., Any]) -> list[Work]:
    """Stand for ``batch_isend_irecv``: NCCL returns one request for the whole batch."""
    parts: list[Part] = []
    outputs: list[tuple[Tensor, Tensor]] = []
    inputs: list[tuple[Tensor, Tensor]] = []
    shadows: list[dist.P2POp] = []
    for op in operations:
        name = op.op.__name__
        kwargs = {"tensor": op.tensor, "group": op.group}
        check_arguments(name, kwargs)
        is_send = name == "isend"
        parts.append(Part(is_send, op.peer, _shape(op.tensor)))
        shadow = op.tensor.detach().clone()
        shadows.append(dist.P2POp(op.op, shadow, op.peer, op.group, op.tag))
        (inputs if is_send else outputs).append((op.tensor, shadow))
    number = _record.add(operations[0].group, "", parts)
    with _inside():
        works = begin(shadows)
    for tensor, _ in outputs:
        _spoil(tensor)
    return [Work(works, number, outputs, inputs, "batch_isend_irecv")]


def _begun(
    collective: Callable[..., Any], bound: inspect.BoundArguments, name: str, number: int
) -> Work:
    """Start ``collective`` on copies of its tensors; `Work.wait` copies back its outputs."""
    values = bound.arguments
    outputs = []
    inputs = []
    for argument, value in [*values.items()]:
        if not (found := _tensors([value])):
            continue
        copies = [t.detach().clone() for t in found]
        values[argument] = copies if isinstance(value, list) else copies[0]
        pairs = list(zip(found, copies, strict=True))
        if argument in _OUTPUTS or name in _IN_PLACE or name == "irecv":
            outputs += pairs
        else:
            inputs += pairs
    written = {t.untyped_storage()._cdata for t, _ in outputs}
    with _inside():
        work = collective(*bound.args, **bound.kwargs)
    for tensor, _ in outputs:
        _spoil(tensor)
    # An output that is a part of the input, or the reverse, is written in place.
    inputs = [(t, c) for t, c in inputs if t.untyped_storage()._cdata not in written]
    return Work([work], number, outputs, inputs, name)


def check_arguments(name: str, values: dict[str, Any]) -> None:
    """Raise as NCCL or ``ProcessGroupNCCL`` does; more strictly for tensors with gaps to send."""
    tensors = _tensors(values.values())
    for tensor in tensors:
        if tensor.dtype not in _DTYPES:
            raise TypeError(f"{name}: NCCL does not take {tensor.dtype}")
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: tensors must be contiguous, found {tensor.stride()}")
    if (op := values.get("op")) is not None:
        word = str(op).rpartition(".")[2]
        if word not in _REDUCTIONS:
            raise ValueError(f"{name}: cannot use ReduceOp.{word} with NCCL")
        for tensor in tensors:
            if tensor.dtype in _FLOAT8:
                raise TypeError(f"{name}: NCCL reduces no {tensor.dtype}")
            if tensor.dtype == torch.bool and word == "AVG":
                raise TypeError(f"{name}: cannot use ReduceOp.AVG with boolean inputs")
    if name in P2P and _peer(name, values) == dist.get_rank(values["group"]):
        raise RuntimeError(f"{name}: a rank that sends to itself outside of a batch hangs")
    splits = [s for n in ("output_split_sizes", "input_split_sizes") if (s := values.get(n))]
    assert all(isinstance(n, int) for s in splits for n in s), f"{name}: the host reads the splits"


@contextlib.contextmanager
def recorded() -> Iterator[Record]:
    """Check and record the calls inside as if their groups were of NCCL, on any device.

    `nccl_order.check` takes the records of all ranks.
    """
    global _record
    before = _record
    _record = Record()
    with contextlib.ExitStack() as stack:
        for name in {*COLLECTIVES, *P2P} & set(vars(dist)):
            call = getattr(dist, name)
            new = checked(call)  # one object: P2POp compares it
            for module in [m for n, m in [*sys.modules.items()] if n.startswith(_CALLERS)]:
                if name in vars(module) and vars(module)[name] is call:
                    stack.enter_context(mock.patch.object(module, name, new))
        begin = partial(batch, begin=dist.batch_isend_irecv)
        stack.enter_context(mock.patch.object(dist, "batch_isend_irecv", begin))
        try:
            yield _record
        finally:
            _record = before


def end() -> None:
    """Check the order of calls of all ranks, on rank 0; called before the groups are destroyed."""
    global _record
    mine = _record
    _record = Record()
    rank = dist.get_rank()
    size = dist.get_world_size()
    if size == 1:
        return
    store = c10d._get_default_store()
    if rank:
        with contextlib.suppress(RuntimeError):  # it may have ended with another rank
            calls = None if mine.has_failed else [mine.calls, mine.members]
            store.set(f"nccl_calls/{rank}", json.dumps(calls))
    elif not mine.has_failed and (found := _gathered(store, mine, size)) is not None:
        for one_queue in (False, True):
            check(*found, one_queue=one_queue)


def _gathered(
    store: dist.Store, mine: Record, size: int
) -> tuple[list[list[Call]], dict[str, list[int]]] | None:
    """Return the calls of all ranks and the members of communicators; None if a rank failed."""
    calls = [mine.calls]
    members = mine.members
    for other in range(1, size):
        try:
            store.wait([f"nccl_calls/{other}"], _PATIENCE)
        except RuntimeError:  # a rank that was stopped in the middle
            return None
        if (theirs := json.loads(store.get(f"nccl_calls/{other}"))) is None:
            return None
        calls.append([_restored(call) for call in theirs[0]])
        members |= theirs[1]
    return calls, members


def _restored(call: list[Any]) -> Call:
    if len(call) == 1:
        return Wait(*call)
    number, communicator, form, parts = call
    return Operation(number, communicator, form, tuple(Part(*part) for part in parts))


@contextlib.contextmanager
def _noting_failure() -> Iterator[None]:
    try:
        yield
    except BaseException:
        _record.has_failed = True
        raise


@contextlib.contextmanager
def _inside() -> Iterator[None]:
    _thread.is_inside = True
    try:
        yield
    finally:
        _thread.is_inside = False


def _tensors(values: Any) -> list[Tensor]:
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list) and value and isinstance(value[0], Tensor):
            found += value
    return found


def _peer(name: str, values: dict[str, Any]) -> int | None:
    side = "dst" if "send" in name else "src"
    if (peer := values.get(f"group_{side}")) is not None:
        return int(peer)
    peer = values.get(side)
    return None if peer is None else dist.get_group_rank(_world(values["group"]), peer)


def _part(name: str, values: dict[str, Any]) -> Part:
    peer = _peer(name, values)
    assert peer is not None, f"{name}: NCCL cannot receive from any rank"
    target = dist.get_global_rank(_world(values["group"]), peer)
    return Part("send" in name, target, _shape(values["tensor"]))


def _form(name: str, values: dict[str, Any]) -> str:
    """Return what must be equal on all ranks of a collective."""
    tensors = _tensors(values.values())
    if values.get("output_split_sizes") or values.get("input_split_sizes"):
        return f"{name} {tensors[0].dtype}"
    shapes = ""
    if tensors:
        shapes = (
            _shape(tensors[0]) if name in _IN_PLACE else _shape(values.get("tensor", tensors[-1]))
        )
    roots = [
        f"{n} {dist.get_group_rank(_world(values['group']), values[n])}"
        for n in ("src", "dst")
        if values.get(n) is not None
    ]
    roots += [
        f"{n[6:]} {values[n]}" for n in ("group_src", "group_dst") if values.get(n) is not None
    ]
    op = [str(values["op"])] if "op" in values else []
    return " ".join([name, shapes, *op, *roots])


def _shape(tensor: Tensor) -> str:
    return f"{tensor.numel()} x {tensor.dtype}"


def _world(group: Any) -> Any:
    return dist.group.WORLD if group is None else group


def _name(group: Any) -> str:
    group = _world(group)
    return f"{group.group_desc} {group.group_name}"


def _spoil(tensor: Tensor) -> None:
    if tensor.numel():
        tensor.data.reshape(-1).view(torch.uint8).fill_(255)


def _has_bytes_of(tensor: Tensor, other: Tensor) -> bool:
    if not tensor.numel() or not tensor.untyped_storage().nbytes():  # empty, or freed by FSDP
        return True
    with _disable_current_modes():  # a recording of the program's operations
        sides = [t.data.reshape(-1).view(torch.uint8) for t in (tensor, other)]
        return torch.equal(*sides)
