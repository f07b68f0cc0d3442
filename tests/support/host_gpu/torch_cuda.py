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
from megatron.core.parallel import collectives
from tests.support import host_gpu, triton_interpreter
from tests.support.host_gpu import attention, gemm, nccl, nccl_calls, norm, symmetric_memory

_threads = threading.local()
_unchecked: list[tuple[Any, str, Any]] = []  # module, name and value of what `checked` replaces
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


def _backends_of(group: Any = None) -> str:
    return str(dist.get_backend_config(group))


def _is_like_nccl(group: Any = None) -> bool:
    return _backends_of(group) == _LIKE_NCCL


def _of_the_device(collective: Any) -> Any:
    """``collective`` with the contract of NCCL, which does not take tensors of the host.

    Nor does gloo send tensors of a GPU: `ProcessGroupGloo` copies to the host and back in
    all-reduce, reduce, broadcast, all-gather, gather, scatter, reduce-scatter and all-to-all only.
    """
    of_nccl = nccl_calls.checked(collective)

    @functools.wraps(collective)
    def checked(*given: Any, group: Any = None, **options: Any) -> Any:
        tensors = [t for t in tree_leaves((given, options)) if isinstance(t, torch.Tensor)]
        backends = _backends_of(group)
        has_device = any(t.is_cuda for t in tensors)
        if backends == _LIKE_NCCL or (backends == host_gpu.LIKE_BOTH and has_device):
            if not all(t.is_cuda for t in tensors):
                raise RuntimeError("No backend type associated with device type cpu")
            return of_nccl(*given, group=group, **options)
        if backends == _GLOO and collective.__name__ in nccl_calls.P2P and has_device:
            raise RuntimeError("gloo sends from memory of the host, and receives into it")
        return collective(*given, group=group, **options)

    return checked


def _batch_of_the_device(begin: Any) -> Any:
    @functools.wraps(begin)
    def batch_isend_irecv(operations: list[dist.P2POp]) -> Any:
        is_gloo = _backends_of(operations[0].group) == _GLOO
        if is_gloo or not operations[0].tensor.is_cuda:
            return begin(operations)
        return nccl_calls.batch(operations, begin)

    return batch_isend_irecv


def _destroying(destroy: Any) -> Any:
    @functools.wraps(destroy)
    def destroy_process_group(group: Any = None) -> None:
        if group in (None, dist.group.WORLD) and dist.is_initialized():
            nccl_calls.end()
        destroy(group)

    return destroy_process_group


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
    kept.extend([attention.register(), gemm.register(), norm.register()])
    kept.append(symmetric_memory.register("CUDA"))
    symmetric_memory.let_ranks_share_memory()
    device.records_graphs = lambda: False  # tests.support.graph_stand_in shows graphs
    device.default_backend = lambda: _LIKE_NCCL if device.is_cuda() else "gloo"
    dist.ProcessGroupNCCL = nccl.ProcessGroupNCCL  # type: ignore[misc, assignment]
    backend = dist.get_backend
    dist.get_backend = lambda group=None: "nccl" if _is_like_nccl(group) else backend(group)
    for name in {*nccl_calls.COLLECTIVES, *nccl_calls.P2P} & set(vars(dist)):
        checked = _of_the_device(getattr(dist, name))
        _replace(dist, name, checked)
        if name in nccl_calls.P2P:
            _replace(dist.distributed_c10d, name, checked)  # P2POp compares with it
        if name in vars(collectives):  # which call methods of the group, that nobody checks
            _replace(collectives, name, checked)
    dist.batch_isend_irecv = _batch_of_the_device(dist.batch_isend_irecv)
    dist.destroy_process_group = _destroying(dist.destroy_process_group)


def _replace(module: Any, name: str, value: Any) -> None:
    _unchecked.append((module, name, getattr(module, name)))
    setattr(module, name, value)


def check_no_collectives() -> None:
    """Let collectives be those of torch and ours: the checks take longer than a GPU's host."""
    for replaced in _unchecked:
        setattr(*replaced)


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
