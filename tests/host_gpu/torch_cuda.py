"""``torch.cuda`` for the device of the host."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from megatron.core import device
from tests import triton_interpreter
from tests.host_gpu import attention, gemm, nccl, symmetric_memory

_threads = threading.local()
kept: list[Any] = []  # what would unregister itself
waits: Any = None  # returns how often the host has waited for the device, once installed
compiled_device: Any = None  # the compiled module, once installed
_DOING_NOTHING = {
    torch.cuda: ("_lazy_init", "set_device", "synchronize", "empty_cache", "_sleep"),
    torch._C: ("_cuda_attach_out_of_memory_observer",),
    torch.cuda.memory: ("_record_memory_history", "_dump_snapshot"),
    torch.cuda.nvtx: ("range_push", "range_pop"),
}


_LIKE_NCCL = "cuda:gloo,cpu:gloo"  # what the device's operations ask is the CPU's
_GLOO = "cpu:gloo,cuda:gloo"  # as torch describes a group of gloo alone
_P2P = ("send", "recv", "isend", "irecv")
_COLLECTIVES = (
    *_P2P,
    *("all_reduce", "reduce", "broadcast", "all_to_all_single"),
    *("all_gather", "all_gather_into_tensor", "gather", "reduce_scatter_tensor"),
    *("all_gather_single", "reduce_scatter_single"),  # names of torch 2.13
)


def _is_like_nccl(group: Any = None) -> bool:
    return str(dist.get_backend_config(group)) == _LIKE_NCCL


def _of_the_device(collective: Any) -> Any:
    """``collective``, which NCCL does not offer for tensors of the host.

    Nor does gloo send tensors of a GPU: `ProcessGroupGloo` copies to the host and back in
    all-reduce, reduce, broadcast, all-gather, gather, scatter, reduce-scatter and all-to-all only.
    """

    @functools.wraps(collective)
    def checked(*given: Any, group: Any = None, **options: Any) -> Any:
        tensors = [t for t in tree_leaves((given, options)) if isinstance(t, torch.Tensor)]
        is_nccl = _is_like_nccl(group)
        if is_nccl and not all(t.is_cuda for t in tensors):
            raise RuntimeError("No backend type associated with device type cpu")
        is_gloo = str(dist.get_backend_config(group)) == _GLOO
        if is_gloo and collective.__name__ in _P2P and any(t.is_cuda for t in tensors):
            raise RuntimeError("gloo sends from memory of the host, and receives into it")
        return collective(*given, group=group, **options)

    return checked


class Stream(torch.Stream):
    """A stream; all of them do at once what they are asked for."""

    def __new__(cls, *_: Any, **__: Any) -> Any:
        return super().__new__(cls, device="cuda:0")


def _event(enable_timing: bool = False, **_: Any) -> torch.Event:
    return torch.Event("cuda:0", enable_timing=enable_timing)


def _current_stream(_: Any = None) -> Any:
    if not hasattr(_threads, "stream"):
        _threads.stream = Stream()
    return _threads.stream


def _set_stream(stream: Any) -> None:
    _threads.stream = stream


@contextlib.contextmanager
def _on_stream(stream: Any) -> Iterator[None]:
    before = _current_stream()
    _set_stream(stream)
    try:
        yield
    finally:
        _set_stream(before)


class _DefaultGenerator:
    """The device's own: it is the host's, whose state is put away and taken back."""

    def __init__(self) -> None:
        self._state = torch.Generator()

    def graphsafe_get_state(self) -> torch.Generator:
        return self._state

    def graphsafe_set_state(self, state: torch.Generator) -> None:
        self._state.set_state(torch.get_rng_state())
        torch.set_rng_state(state.get_state())
        self._state = state


def install(compiled: Any) -> None:
    """Let torch find the device; collectives of its tensors are those of the host."""
    global compiled_device, waits
    compiled_device = compiled
    waits = compiled.waits
    properties = SimpleNamespace(total_memory=80 * 2**30, name="host", uuid="0", major=9, minor=0)
    stands_for = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda *_: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_properties": lambda _=None: properties,
        "get_device_capability": lambda _=None: (9, 0),
        "get_device_name": lambda _=None: "host",
        "memory_stats": lambda _=None: {"allocation.all.current": 0},
        "memory_allocated": lambda _=None: compiled.allocated(),
        "max_memory_allocated": lambda _=None: compiled.most_allocated(),
        "memory_reserved": lambda _=None: compiled.allocated(),
        "max_memory_reserved": lambda _=None: compiled.most_allocated(),
        "mem_get_info": lambda _=None: (2**36, 80 * 2**30),
        "reset_peak_memory_stats": lambda _=None: compiled.reset_peak_memory(),
        "get_rng_state": lambda _=None: torch.get_rng_state(),
        "set_rng_state": lambda state, _=None: torch.set_rng_state(state),
        "manual_seed": torch.manual_seed,
        "default_generators": (_DefaultGenerator(),),
        "Stream": Stream,
        "Event": _event,
        "current_stream": _current_stream,
        "set_stream": _set_stream,
        "stream": _on_stream,
    }
    for name, value in stands_for.items():
        setattr(torch.cuda, name, value)
    for module, names in _DOING_NOTHING.items():
        for name in names:
            setattr(module, name, lambda *_, **__: None)  # each its own: torch.compile asks
    torch.cuda.nccl.version = lambda: (2, 27, 0)  # the profiler writes it down
    _let_storages_be_resized()
    if os.environ.get("TRITON_INTERPRET") == "1":
        triton_interpreter.mend()
    kept.extend([attention.register(), gemm.register(), symmetric_memory.register("CUDA")])
    symmetric_memory.let_ranks_share_memory()
    device.records_graphs = lambda: False  # tests.graph_stand_in shows graphs
    device.default_backend = lambda: _LIKE_NCCL if device.is_cuda() else "gloo"
    dist.ProcessGroupNCCL = nccl.ProcessGroupNCCL  # type: ignore[misc, assignment]
    backend = dist.get_backend
    dist.get_backend = lambda group=None: "nccl" if _is_like_nccl(group) else backend(group)
    for name in set(_COLLECTIVES) & set(vars(dist)):
        checked = _of_the_device(getattr(dist, name))
        setattr(dist, name, checked)
        if name in _P2P:
            setattr(dist.distributed_c10d, name, checked)  # P2POp compares with it


def _let_storages_be_resized() -> None:
    own = torch.UntypedStorage.resize_

    def resize(self: torch.UntypedStorage, num_bytes: int) -> Any:
        if self.device.type != "cuda":
            return own(self, num_bytes)
        whole = torch.empty(0, dtype=torch.uint8, device="cuda").set_(self)
        torch.ops.host_gpu.resize_storage(whole, num_bytes)
        return self

    torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
    library = torch.library.Library("inductor", "IMPL")
    library.impl("resize_storage_bytes_", torch.ops.host_gpu.resize_storage, "CUDA")
    kept.append(library)
