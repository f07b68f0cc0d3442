"""The only file that knows device kinds: cpu (gloo) and cuda (nccl).

Everything else asks here.  The device is chosen once at start-up; ``current()`` before that is
the CPU, so that the library works without the application.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Literal

import torch

from megatron.core.device import process_memory
from megatron.core.rank_local import each_rank_owns

if TYPE_CHECKING:
    from torch._C import _cuda_CUDAAllocator as Allocator
    from torch.cuda import _POOL_HANDLE as GraphPool
    from torch.cuda import Event as Event
    from torch.cuda import MemPool as MemPool
    from torch.cuda import Stream as Stream

    Moment = float | Event  # on the CPU the clock of the process

Kind = Literal["cpu", "cuda"]
CPU: Kind = "cpu"
_current = torch.device("cpu")
_imagined: Kind | None = None  # inside `simulate_device`
_own_stream: Stream | None = None  # in place of the default one
each_rank_owns(__name__, "_current", "_imagined", "_own_stream")


def choose(wanted: str, local_rank: int = 0) -> torch.device:
    """Select this process's device: auto is cuda when a GPU is visible, else cpu.

    Raises ValueError when cuda is asked for and no GPU is visible.
    """
    global _current
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: no GPU is visible; use --device cpu or auto")
    if wanted == "cpu" or not torch.cuda.is_available():
        _current = torch.device("cpu")
    else:
        _current = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(_current)
    return _current


def current() -> torch.device:
    """The device of this process."""
    return _current


def use_in_this_thread() -> None:
    """Say so in a thread that was started later: each begins with the first GPU."""
    if _has_gpu():
        torch.cuda.set_device(_current)
    if _own_stream is not None:
        torch.cuda.set_stream(_own_stream)


@contextlib.contextmanager
def simulate_device(
    wanted: str, *, without_memory: bool = True
) -> Iterator[None]:
    """Code inside takes the ways of a GPU, unless the CPU is wanted.

    ``without_memory``: the device is meta, so that tensors have shapes alone.
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
    """Whether ``device`` (default: this process's) is a GPU, or is imagined to be one."""
    return (_imagined or (device or _current).type) == "cuda"


def launches_kernels(where: torch.device) -> bool:
    """Whether what lies there is in a GPU's memory, not imagined to be."""
    return where.type == "cuda"


def _has_gpu() -> bool:
    return _current.type == "cuda"


def default_backend() -> str:
    """The collective library that fits the device."""
    return "nccl" if is_cuda() else "gloo"


def backend_serves(wanted: str, backend: str | None) -> bool:
    """Whether collectives of ``backend`` reach tensors on the kind of device that is asked for."""
    return not (wanted == "cpu" and backend == "nccl")


def keep_bf16_sums_in_fp32() -> None:
    """Forbid matrix products to add up parts of bfloat16 results in bfloat16."""
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


@functools.cache
def supports_fp32_accumulate_addmm() -> bool:
    """Whether a product of 16-bit matrices can be added to a 32-bit one in one operation.

    Tried out: which releases of torch have it, on which devices, is nowhere written down.
    """
    if not _has_gpu():
        return is_cuda()
    total = torch.ones(16, 16, device=_current)
    ones = torch.ones(16, 16, device=_current, dtype=torch.bfloat16)
    try:
        torch.addmm(total, ones, ones, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):
        return False
    return bool((total == 17).all())


@functools.cache
def multiplies_fp8(device: torch.device) -> bool:
    """Whether products of 8-bit matrices are fast on ``device``; a CPU only knows them."""
    if device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)


def synchronize() -> None:
    """Wait until the device has done all queued work."""
    if _has_gpu():
        torch.cuda.synchronize()


def moment() -> Moment:
    """A point in the work of the device, for `seconds_between`."""
    if not _has_gpu():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(begin: Moment, end: Moment) -> float:
    """From one `moment` to a later one; waits until the device is there."""
    if isinstance(begin, float):
        assert isinstance(end, float), "the device changed between two moments"
        return end - begin
    assert not isinstance(end, float), "the device changed between two moments"
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000


def host_memory(num_bytes: int) -> torch.Tensor:
    """Bytes in host memory, page-locked where this process has a GPU to copy from."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_cuda())


def host_is_apart() -> bool:
    """Whether the host has memory of its own beside the device's."""
    return is_cuda()


def host_like(like: torch.Tensor, dtype: torch.dtype, *, pin: bool) -> torch.Tensor:
    """Host memory of the shape of a device's tensor, page-locked for ``pin`` on a GPU's host."""
    where = "meta" if like.is_meta else "cpu"
    return torch.empty(like.shape, dtype=dtype, device=where, pin_memory=pin and like.is_cuda)


def host_array(values: torch.Tensor, target: torch.device) -> torch.Tensor:
    """``values``, page-locked if they are to be copied to a GPU without waiting."""
    return values.pin_memory() if target.type == "cuda" else values


def empty_cache() -> None:
    """Give cached device memory back."""
    if _has_gpu():
        torch.cuda.empty_cache()


def memory_stats() -> dict[str, float]:
    """Bytes in use; on the CPU those of the process, and 0 as the count of allocations."""
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
    """Bytes of this process's device; of the host, its share with ``ranks_here`` processes."""
    if _has_gpu():
        return int(torch.cuda.get_device_properties(current()).total_memory)
    return process_memory.available_to_job() // ranks_here


def memory_pool(allocator: Allocator) -> MemPool:
    """A pool of device memory that ``allocator`` serves, for `allocating_from`."""
    return torch.cuda.MemPool(allocator)


def allocating_from(pool: MemPool) -> contextlib.AbstractContextManager[None]:
    """Let this thread's allocations inside come from ``pool``."""
    return torch.cuda.use_mem_pool(pool)


def reset_peak_memory() -> None:
    """``max_allocated`` counts from now on."""
    if _has_gpu():
        torch.cuda.reset_peak_memory_stats()


def rng_state() -> torch.Tensor:
    """State of the device's default generator."""
    return torch.cuda.get_rng_state() if _has_gpu() else torch.get_rng_state()


def set_rng_state(state: torch.Tensor) -> None:
    """Restore what `rng_state` returned."""
    if _has_gpu():
        torch.cuda.set_rng_state(state)
    else:
        torch.set_rng_state(state)


def manual_seed(seed: int) -> None:
    """Seed the default generators of the host and of the device."""
    torch.manual_seed(seed)


def side_stream() -> Stream | None:
    """A stream beside the present one, behind all that is queued there; None on the CPU."""
    if not _has_gpu():
        return None
    stream = torch.cuda.Stream()
    wait_stream(stream)
    return stream


def join_stream(stream: Stream | None) -> None:
    """Let the present stream wait for ``stream`` (from `side_stream`)."""
    if stream is not None:
        torch.cuda.current_stream().wait_stream(stream)


def wait_stream(stream: Stream | None) -> None:
    """Let ``stream`` (from `side_stream`) wait for what is queued on the present one."""
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream())


def wait_event(marked: Event | None) -> None:
    """Let the present stream wait until the device is at a `record_event`; the host goes on."""
    if marked is not None:
        torch.cuda.current_stream().wait_event(marked)


def record_event() -> Event | None:
    """The end of what is queued on the present stream, for `wait_for`; None on the CPU."""
    return torch.cuda.current_stream().record_event() if _has_gpu() else None


def wait_for(marked: Event | None) -> None:
    """Wait on the host until the device is at a `record_event`."""
    if marked is not None:
        marked.synchronize()


def finish_stream() -> None:
    """Wait until the present stream has done all that is queued on it."""
    if _has_gpu():
        torch.cuda.current_stream().synchronize()


def on_stream(stream: Stream | None) -> contextlib.AbstractContextManager[None]:
    """Run the block on ``stream`` (from `side_stream`)."""
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)


class RandomStream:
    """Random numbers apart from those of the default generator, which draws them in `drawing`.

    ``capturable``: also inside a `Graph`, which goes on with them each time it is replayed.
    """

    def __init__(self, state: torch.Tensor, *, capturable: bool = False) -> None:
        self.generator = torch.Generator(_current) if capturable and _has_gpu() else None
        self.set_state(state)

    def get_state(self) -> torch.Tensor:
        """What `set_state` takes: a state of the default generator, which is never written to."""
        return self._state if self.generator is None else self.generator.get_state()

    def set_state(self, state: torch.Tensor) -> None:
        """Go on from ``state``."""
        if self.generator is None:
            self._state = state  # never written to
        else:
            self.generator.set_state(state)

    @contextlib.contextmanager
    def drawing(self) -> Iterator[None]:
        """Let the default generator draw from here inside the block."""
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
    """Work of the device that is recorded once and then done again, in one go, without Python.

    A replay reads and writes the memory that was there at the recording.  What is allocated while
    recording comes from ``pool``: graphs of one pool are replayed in the order of their recording.
    ``streams`` are those that may be drawn from inside.
    """

    def __init__(self, pool: GraphPool, streams: Iterable[RandomStream] = ()) -> None:
        self._graph, self._pool = torch.cuda.CUDAGraph(), pool
        for stream in streams:
            if stream.generator is not None:
                self._graph.register_generator_state(stream.generator)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record what the block asks of the device; nothing is computed yet."""
        # Other threads (of the loader, of NCCL's watchdog) may go on meanwhile.
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            yield
        finally:
            self._graph.capture_end()

    def replay(self) -> None:
        """Do it again, behind what is queued on the present stream."""
        self._graph.replay()

    def release(self) -> None:
        """Let go of memory and groups, whoever still refers to it."""
        self._graph.reset()


def records_graphs() -> bool:
    """Whether `Graph` works here."""
    return _has_gpu()


def graph_pool() -> GraphPool:
    """Memory that graphs share."""
    return torch.cuda.graph_pool_handle()


def leave_default_stream() -> None:
    """Work on a stream of this process's own from now on: the default one cannot be recorded.

    What is recorded meets autograd's nodes of parameters; all of them have to be of this stream.
    """
    global _own_stream
    if _own_stream is None and (stream := side_stream()) is not None:
        _own_stream = stream
        torch.cuda.set_stream(stream)


@contextlib.contextmanager
def about_to_record() -> Iterator[None]:
    """Around the recording of graphs: garbage that is freed inside one would break it."""
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


def profiler_start() -> None:
    """Begin the window of an attached profiler such as nsys."""
    if _has_gpu():
        torch.cuda.cudart().cudaProfilerStart()


def profiler_stop() -> None:
    """End the window of an attached profiler."""
    if _has_gpu():
        torch.cuda.cudart().cudaProfilerStop()


def name() -> str:
    """The device in words."""
    return torch.cuda.get_device_name() if _has_gpu() else "cpu"


def uuid() -> str:
    """The name by which NVML knows this process's GPU."""
    return f"GPU-{torch.cuda.get_device_properties(_current).uuid}"


def record_memory_history(oom_path: str) -> None:
    """Record allocations for `dump_memory_history`; write ``oom_path`` when one fails."""
    if _has_gpu():
        torch.cuda.memory._record_memory_history(max_entries=100_000)
        observe = torch._C._cuda_attach_out_of_memory_observer  # type: ignore[attr-defined]
        observe(lambda *_: dump_memory_history(oom_path))


def dump_memory_history(path: str) -> None:
    """Write the recorded allocations as a snapshot for pytorch.org/memory_viz."""
    if _has_gpu():
        torch.cuda.memory._dump_snapshot(path)
