"""What `device.Graph` is on a GPU, on a CPU: operations on fixed memory, replayed without Python.

Recording notes every operation below autograd with the tensors it was given and those it made.  A
replay runs the same operations on the same memory: what Python has made since is not seen.  As on
a GPU, a recording leaves no trace: what it wrote to, and random numbers it drew, are put back.
What it cannot show: memory that graphs of one pool share, and what is slow or refused on a stream.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from megatron.core import device
from megatron.core.device import cpu_kernels
from megatron.core.fusions import linear_cross_entropy, paged_attention
from megatron.core.models.T5 import t5_model
from megatron.core.tensor_parallel import layers


class _Tape(TorchDispatchMode):
    """Steps, each a function without arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Any] = []
        self.travelling: list[Any] = []  # from rank to rank: waited for when all are under way
        self.made: set[int] = set()  # storages; alive as long as the steps
        self.before: dict[int, tuple[Tensor, Tensor]] = {}  # what is to be put back

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = tree_leaves((args, kwargs))
        if waits(func, given):
            raise RuntimeError(f"{func} in a graph: Python must not wait for a number")
        for tensor in (t for t in given if isinstance(t, Tensor)):
            self._keep(tensor)
        result = func(*args, **kwargs)
        old = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        known = {_storage(t) for t in given if isinstance(t, Tensor)}
        fresh = [i for i, t in enumerate(old) if _storage(t) not in known]
        self.made |= {_storage(old[i]) for i in fresh}

        def again() -> None:
            is_message = str(func).startswith(("c10d.send", "c10d.recv"))
            if not is_message:
                self.finish()
            new = func(*args, **kwargs)
            self.travelling.append(new)
            if not is_message:
                self.finish()
            tensors = [t for t in tree_leaves(new) if isinstance(t, Tensor)]
            for i in fresh:
                old[i].data.copy_(tensors[i])

        self.steps.append(again)
        return result

    def _keep(self, tensor: Tensor) -> None:
        key = _storage(tensor)
        if key not in self.made and key not in self.before:
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            whole.set_(tensor.untyped_storage())
            self.before[key] = whole, whole.clone()

    def finish(self) -> None:
        """Wait for collectives."""
        while self.travelling:
            for leaf in tree_leaves(self.travelling.pop(0)):
                if hasattr(leaf, "wait"):
                    leaf.wait()

    def put_back(self) -> None:
        for now, before in self.before.values():
            now.copy_(before)


def waits(func: Any, given: Sequence[Any]) -> bool:
    """Whether Python has to know numbers: for itself, or for the shape of what comes out."""
    if func is torch.ops.aten.index.Tensor:
        return any(isinstance(t, Tensor) and t.dtype == torch.bool for t in given[1:])
    return bool({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & {*func.tags})


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class TapeGraph:
    """Takes the place of `device.Graph`."""

    replays = 0  # of all graphs, so that a test knows that there were any
    graphs = 0
    living = 0

    def __init__(self, pool: Any, streams: Iterable[device.RandomStream] = ()) -> None:
        self._tape, self._streams = _Tape(), list(streams)
        TapeGraph.graphs += 1
        TapeGraph.living += 1

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        own, named = torch.get_rng_state(), [s.get_state() for s in self._streams]
        _recorded.append(self._tape)
        try:
            with self._tape:
                yield
        finally:
            _recorded.pop()
            self._tape.put_back()
            torch.set_rng_state(own)
            for stream, state in zip(self._streams, named, strict=True):
                stream.set_state(state)

    def replay(self) -> None:
        TapeGraph.replays += 1
        with torch.no_grad():
            for step in self._tape.steps:
                step()
            self._tape.finish()

    def release(self) -> None:
        TapeGraph.living -= 1
        self._tape.steps.clear()


def _unseen_wait(work: dist.Work, *args: Any) -> Any:
    """What gloo copies at the end of a collective is no operation of its own."""
    with _disable_current_modes():
        return _wait(work, *args)


_wait = dist.Work.wait
_recorded: list[_Tape] = []
_sees_a_gpu = mock.Mock(wraps=device, is_cuda=lambda *_: True)  # and looks at no number
_drawing = device.RandomStream.drawing


@contextlib.contextmanager
def _noted_drawing(stream: device.RandomStream) -> Iterator[None]:
    """`RandomStream.drawing`, which a graph does without Python."""
    tape = _recorded[-1] if _recorded else None
    blocks: list[Any] = []

    def enter() -> None:
        blocks.append(_drawing(stream))
        blocks[-1].__enter__()

    def leave() -> None:
        blocks.pop().__exit__(None, None, None)

    if tape is not None:
        tape.steps.append(enter)
    enter()
    try:
        yield
    finally:
        leave()
        if tape is not None:
            tape.steps.append(leave)


@contextlib.contextmanager
def graphs_on_cpu() -> Iterator[type[TapeGraph]]:
    """Code inside records graphs as on a GPU."""
    TapeGraph.replays = TapeGraph.graphs = TapeGraph.living = 0
    with (
        mock.patch.object(device, "Graph", TapeGraph),
        mock.patch.object(device, "records_graphs", return_value=True),
        mock.patch.object(device, "graph_pool", return_value=None),
        mock.patch.object(device.RandomStream, "drawing", _noted_drawing),
        mock.patch.object(dist.Work, "wait", _unseen_wait),
        mock.patch.object(cpu_kernels, "take", return_value=False),  # no operations of torch
        mock.patch.object(layers, "device", _sees_a_gpu),
        mock.patch.object(t5_model, "device", _sees_a_gpu),
        mock.patch.object(linear_cross_entropy, "device", _sees_a_gpu),
        mock.patch.object(paged_attention, "device", _sees_a_gpu),
    ):
        yield TapeGraph
