"""Device of this process: cpu (gloo) or cuda (nccl).

Only this file calls ``torch.cuda``.  `choose` selects the device once at start-up; before that
`current` returns the CPU, so that the library works without the application.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Literal

import torch

from megatron.core import process_memory
from megatron.core.rank_local import each_rank_owns

if TYPE_CHECKING:
    from torch._C import _cuda_CUDAAllocator as Allocator
    from torch.cuda import _POOL_HANDLE as GraphPool
    from torch.cuda import Event as Event
    from torch.cuda import MemPool as MemPool
    from torch.cuda import Stream as Stream

    Moment = float | Event  # CPU: seconds of ``time.perf_counter``

logger = logging.getLogger(__name__)
Kind = Literal["cpu", "cuda"]
CPU: Kind = "cpu"
CUDA: Kind = "cuda"
_current = torch.device("cpu")
_imagined: Kind | None = None  # simulated kind, inside `simulate_device`
_own_stream: Stream | None = None  # replaces the default stream (`leave_default_stream`)
each_rank_owns(__name__, "_current", "_imagined", "_own_stream")


def choose(wanted: str, local_rank: int = 0) -> torch.device:
    """Select this process's device; ``wanted`` is cpu, cuda or auto (cuda if a GPU is visible).

    Raises ValueError for cuda if no GPU is visible.
    """
    global _current
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: no GPU is visible; use --device cpu or auto")
    if not selects_gpu(wanted):
        _current = torch.device("cpu")
    else:
        _current = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(_current)
    return _current


def selects_gpu(wanted: str) -> bool:
    """Return whether `choose` selects a GPU for ``wanted``, or raises because there is none."""
    return wanted == "cuda" or (wanted != "cpu" and torch.cuda.is_available())


def current() -> torch.device:
    """Return the device of this process."""
    return _current


def use_in_this_thread() -> None:
    """Select device and stream in a new thread, which starts on GPU 0 and its default stream."""
    if _has_gpu():
        torch.cuda.set_device(_current)
    if _own_stream is not None:
        torch.cuda.set_stream(_own_stream)


@contextlib.contextmanager
def simulate_device(wanted: str, *, without_memory: bool = True) -> Iterator[None]:
    """Simulate a device: code inside takes the branches for a GPU, unless ``wanted`` is cpu.

    ``without_memory``: the device is meta, so that tensors have shapes but no values.
    """
    global _current, _imagined
    before = _current, _imagined
    _current = torch.device("meta" if without_memory else "cpu")
    _imagined = "cpu" if wanted == "cpu" else "cuda"
    try:
        yield
    finally:
        _current, _imagined = before


def is_cuda(device: torch.device | None = None) -> bool:
    """Return whether ``device`` (default: this process's) is a real or simulated GPU."""
    return (_imagined or (device or _current).type) == "cuda"


def launches_kernels(where: torch.device) -> bool:
    """Return whether ``where`` is a real GPU, not a simulated one."""
    return where.type == "cuda"


def _has_gpu() -> bool:
    return _current.type == "cuda"


def default_backend() -> str:
    """Return the torch.distributed backend of the device."""
    return "nccl" if is_cuda() else "gloo"


def backend_serves(wanted: str, backend: str | None) -> bool:
    """Return whether ``backend`` supports tensors on the kind of device that ``wanted`` selects."""
    return not (wanted == "cpu" and backend == "nccl")


def keep_bf16_sums_in_fp32() -> None:
    """Forbid GEMMs with bfloat16 output to reduce partial sums in bfloat16."""
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


@functools.cache
def supports_fp32_accumulate_addmm() -> bool:
    """Return whether ``torch.addmm`` adds a matmul of 16-bit matrices to an fp32 matrix.

    Runs it once: torch does not document which releases and devices support it.
    """
    if not _has_gpu():
        return is_cuda()
    total = torch.ones(16, 16, device=_current)
    ones = torch.ones(16, 16, device=_current, dtype=torch.bfloat16)
    try:
        torch.addmm(total, ones, ones, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError) as error:
        logger.warning(
            "weight gradients are added to fp32 buffers in a second pass, which takes longer: "
            f"torch.addmm of 16-bit matrices into fp32: {type(error).__name__}: {error}"
        )
        return False
    return bool((total == 17).all())


@functools.cache
def multiplies_fp8(device: torch.device) -> bool:
    """Return whether ``device`` has fp8 GEMMs in hardware; on a CPU they are slow."""
    return capability(device) >= (8, 9)


def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a GPU, (0, 0) of a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def synchronize() -> None:
    """Block the host until the device has finished all queued work."""
    if _has_gpu():
        torch.cuda.synchronize()


def moment() -> Moment:
    """Record a point in time on the current stream of the device, for `seconds_between`."""
    if not _has_gpu():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(begin: Moment, end: Moment) -> float:
    """Return the seconds between two `moment` results; blocks until the device reaches ``end``."""
    if isinstance(begin, float):
        assert isinstance(end, float), "the device changed between two moments"
        return end - begin
    assert not isinstance(end, float), "the device changed between two moments"
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000


def host_memory(num_bytes: int) -> torch.Tensor:
    """Return a byte tensor in host memory, page-locked if this process has a GPU."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_cuda())


def host_is_apart() -> bool:
    """Return whether host memory and device memory are separate."""
    return is_cuda()


def host_like(like: torch.Tensor, dtype: torch.dtype, *, pin: bool) -> torch.Tensor:
    """Return an empty host tensor with the shape of ``like``; ``pin``: page-locked for a GPU."""
    where = "meta" if like.is_meta else "cpu"
    return torch.empty(like.shape, dtype=dtype, device=where, pin_memory=pin and like.is_cuda)


def host_array(values: torch.Tensor, target: torch.device) -> torch.Tensor:
    """Return ``values``, page-locked if ``target`` is a GPU, so that copies can be asynchronous."""
    return values.pin_memory() if target.type == "cuda" else values


def empty_cache() -> None:
    """Release cached device memory."""
    if _has_gpu():
        torch.cuda.empty_cache()


def memory_stats() -> dict[str, float]:
    """Return bytes in use; on the CPU those of the process, with an allocation count of 0."""
    if not _has_gpu():
        now, peak = process_memory.resident_and_peak()
        return {
            **dict.fromkeys(("allocated", "reserved"), now),
            **dict.fromkeys(("max_allocated", "max_reserved"), peak),
            "allocated_count": 0,
        }
    stats = torch.cuda.memory_stats()
    return {
        "allocated": torch.cuda.memory_allocated(),
        "max_allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
        "max_reserved": torch.cuda.max_memory_reserved(),
        "allocated_count": stats.get("allocation.all.current", 0),
    }


def total_memory(ranks_here: int = 1) -> int:
    """Return the bytes of the GPU, or the host's memory divided by ``ranks_here`` processes."""
    if _has_gpu():
        return int(torch.cuda.get_device_properties(current()).total_memory)
    return process_memory.available_to_job() // ranks_here


def free_memory(ranks_here: int = 1) -> int:
    """Return the bytes that a process can still allocate: its share of the host's, or a GPU's."""
    if _has_gpu():
        return int(torch.cuda.mem_get_info(current())[0])
    return process_memory.free_for_job() // ranks_here


def memory_pool(allocator: Allocator) -> MemPool:
    """Return a pool of device memory from ``allocator``, for `allocating_from`."""
    return torch.cuda.MemPool(allocator)


def allocating_from(pool: MemPool) -> contextlib.AbstractContextManager[None]:
    """Return a context in which this thread allocates device memory from ``pool``."""
    return torch.cuda.use_mem_pool(pool)


def rng_state() -> torch.Tensor:
    """Return the state of the device's default generator."""
    return torch.cuda.get_rng_state() if _has_gpu() else torch.get_rng_state()


def set_rng_state(state: torch.Tensor) -> None:
    """Restore a result of `rng_state`."""
    restore = torch.cuda.set_rng_state if _has_gpu() else torch.set_rng_state
    restore(state)


def seeded_rng_state(seed: int) -> torch.Tensor:
    """Return the state that the device's default generator has after `manual_seed`."""
    return torch.Generator(_current if _has_gpu() else CPU).manual_seed(seed).get_state()


def manual_seed(seed: int) -> None:
    """Seed the default generators of the host and of the device."""
    torch.manual_seed(seed)


def side_stream() -> Stream | None:
    """Return a new stream that waits for work queued on the current one; None on the CPU."""
    if not _has_gpu():
        return None
    stream = torch.cuda.Stream()
    wait_stream(stream)
    return stream


def join_stream(stream: Stream | None) -> None:
    """Make the current stream wait for ``stream`` (from `side_stream`)."""
    if stream is not None:
        torch.cuda.current_stream().wait_stream(stream)


def wait_stream(stream: Stream | None) -> None:
    """Make ``stream`` (from `side_stream`) wait for work queued on the current stream."""
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream())


def wait_event(marked: Event | None) -> None:
    """Make the current stream wait for a `record_event`, without blocking the host."""
    if marked is not None:
        torch.cuda.current_stream().wait_event(marked)


def record_event() -> Event | None:
    """Record an event after all work queued on the current stream; None on the CPU."""
    return torch.cuda.current_stream().record_event() if _has_gpu() else None


def wait_for(marked: Event | None) -> None:
    """Block the host until the device reaches a `record_event`."""
    if marked is not None:
        marked.synchronize()


def finish_stream() -> None:
    """Block the host until the current stream has finished all queued work."""
    if _has_gpu():
        torch.cuda.current_stream().synchronize()


def on_stream(stream: Stream | None) -> contextlib.AbstractContextManager[None]:
    """Return a context that runs on ``stream`` (from `side_stream`)."""
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)


class RandomStream:
    """Random number stream that the default generator uses inside `drawing`.

    ``capturable``: usable inside a `Graph`, each replay of which continues the stream.
    """

    def __init__(self, state: torch.Tensor, *, capturable: bool = False) -> None:
        self.generator = torch.Generator(_current) if capturable and _has_gpu() else None
        self.set_state(state)

    def get_state(self) -> torch.Tensor:
        """Return the state of the stream, for `set_state`; it is never changed in place."""
        return self._state if self.generator is None else self.generator.get_state()

    def set_state(self, state: torch.Tensor) -> None:
        """Continue the stream from ``state``."""
        if self.generator is None:
            self._state = state  # never written to
        else:
            self.generator.set_state(state)

    @contextlib.contextmanager
    def drawing(self) -> Iterator[None]:
        """Make the default generator use this stream inside the context."""
        if self.generator is None:
            before = rng_state()
            set_rng_state(self._state)
            try:
                yield
            finally:
                self._state = rng_state()
                set_rng_state(before)
            return
        default = torch.cuda.default_generators[_current.index]
        own = default.graphsafe_get_state()
        default.graphsafe_set_state(self.generator)  # the state itself, not a copy
        try:
            yield
        finally:
            default.graphsafe_set_state(own)


class Graph:
    """CUDA graph: device work that is captured once and replayed without Python.

    A replay reads and writes the same addresses as the capture.  Memory that is allocated during
    capture comes from ``pool``; graphs of one pool must be replayed in the order of their capture.
    ``streams``: the random number streams that captured code may use.
    """

    def __init__(self, pool: GraphPool, streams: Iterable[RandomStream] = ()) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._pool = pool
        for stream in streams:
            if stream.generator is not None:
                self._graph.register_generator_state(stream.generator)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Capture the device work of the context; nothing is computed yet."""
        # thread_local: other threads (data loader, NCCL watchdog) may call CUDA during capture.
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            yield
        finally:
            self._graph.capture_end()

    def replay(self) -> None:
        """Queue the captured work on the current stream."""
        self._graph.replay()

    def release(self) -> None:
        """Free memory and process groups of the graph, even if references to this object remain."""
        self._graph.reset()


def records_graphs() -> bool:
    """Return whether the device supports `Graph`."""
    return _has_gpu()


def graph_pool() -> GraphPool:
    """Return a memory pool that several graphs share."""
    return torch.cuda.graph_pool_handle()


def leave_default_stream() -> None:
    """Use a new stream instead of the default one, which cannot be captured, from now on.

    Call it before autograd nodes of parameters exist: those in a capture must be of this stream.
    """
    global _own_stream
    if _own_stream is None and (stream := side_stream()) is not None:
        _own_stream = stream
        torch.cuda.set_stream(stream)


@contextlib.contextmanager
def about_to_record() -> Iterator[None]:
    """Collect garbage, and disable the collector: freeing memory during capture would break it."""
    synchronize()
    gc.collect()
    empty_cache()
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def profiler_range() -> contextlib.AbstractContextManager[None]:
    """Return a context that is the capture range of an attached profiler, for example nsys."""
    return torch.cuda.profiler.profile() if _has_gpu() else contextlib.nullcontext()


def name() -> str:
    """Return the name of the device, for example of the GPU model."""
    return torch.cuda.get_device_name() if _has_gpu() else "cpu"


def uuid() -> str:
    """Return the UUID of this process's GPU in NVML's format."""
    return f"GPU-{torch.cuda.get_device_properties(_current).uuid}"


def record_memory_history(oom_path: str) -> None:
    """Record allocations for `dump_memory_history`; dump to ``oom_path`` if one fails."""
    if _has_gpu():
        torch.cuda.memory._record_memory_history(max_entries=100_000)
        observe = torch._C._cuda_attach_out_of_memory_observer  # type: ignore[attr-defined]
        observe(lambda *_: dump_memory_history(oom_path))


def dump_memory_history(path: str) -> None:
    """Write the recorded allocations as a snapshot for pytorch.org/memory_viz."""
    if _has_gpu():
        torch.cuda.memory._dump_snapshot(path)
