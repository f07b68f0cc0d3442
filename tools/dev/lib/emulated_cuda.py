"""Calls of torch.cuda that answer for the CPU, for programs that make them without asking.

NVIDIA's Megatron Core and the projects that build on it do.  Their files stay as they are.  With a
GPU nothing is replaced.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils._contextlib import _DecoratorContextManager

CPU = torch.device("cpu")


class _Nothing(_DecoratorContextManager):
    """A stream, an event or a context manager without effect."""

    cuda_stream = 0

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def record(self, *args: object, **kwargs: object) -> _Nothing:
        """Do nothing, as every method here."""
        return self

    wait = synchronize = wait_stream = wait_event = record_event = record
    range_push = range_pop = range = record  # of torch.cuda.nvtx

    def elapsed_time(self, other: object) -> float:
        """Return no time."""
        return 0.0

    def query(self) -> bool:
        """Return that everything has ended."""
        return True


class _OnCpu(TorchFunctionMode):
    """Runs torch's functions on the CPU, whatever device their arguments name."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call the function with other devices, or its stand-in."""
        kwargs = {name: _on_cpu(value) for name, value in (kwargs or {}).items()}
        if isinstance(kwargs.get("device"), int):
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)
        if function in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if function is torch.Tensor.record_stream:
            return None
        if function is torch.Tensor.to and isinstance(args[1] if args[1:] else None, int):
            args = (args[0], CPU, *args[2:])
        found = function(*map(_on_cpu, args), **kwargs)
        if function is torch.Tensor.type and isinstance(found, str):
            return found.replace("torch.", "torch.cuda.")  # NVIDIA's dispatch of dtypes asks it
        return found


def _on_cpu(value: Any) -> Any:
    is_device = isinstance(value, str | torch.device) and str(value).startswith("cuda")
    return CPU if is_device else value


def _returns(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


_scatter, _exchange = dist.scatter, dist.all_to_all_single


def _scatter_whole(
    tensor: torch.Tensor, scatter_list: list[torch.Tensor] | None = None, **more: Any
) -> Any:
    shares = scatter_list and [share.contiguous() for share in scatter_list]
    return _scatter(tensor, shares, **more)


def _exchange_by_lists(*args: Any, **kwargs: Any) -> Any:
    sizes = {k: v.tolist() if torch.is_tensor(v) else v for k, v in kwargs.items()}
    return _exchange(*args, **sizes)


# (object, name of the function) -> what takes its place.
EMULATED: dict[tuple[Any, str], Any] = {
    # Devices: the CPU is the current one, and each process of a machine has one.
    (torch.cuda, "is_initialized"): _returns(True),
    (torch.cuda, "_lazy_init"): _returns(None),
    (torch.cuda, "_lazy_call"): lambda function, **_: function(),
    (torch.cuda, "current_device"): _returns(CPU),
    (torch.cuda, "device_count"): lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
    (torch.cuda, "set_device"): _returns(None),
    (torch.cuda, "device"): _Nothing,
    (torch.nn.Module, "cuda"): lambda module, *_: module,
    # Streams and events: work is done when a call returns.
    (torch.cuda, "Stream"): _Nothing,
    (torch.cuda, "Event"): _Nothing,
    (torch.cuda, "stream"): _Nothing,
    (torch.cuda, "current_stream"): _Nothing,
    (torch.cuda, "default_stream"): _Nothing,
    (torch.cuda, "synchronize"): _returns(None),
    (torch.cuda, "nvtx"): _Nothing(),
    # Memory: none is used on a GPU.
    (torch.cuda, "empty_cache"): _returns(None),
    (torch.cuda, "memory_allocated"): _returns(0),
    (torch.cuda, "memory_reserved"): _returns(0),
    (torch.cuda, "max_memory_allocated"): _returns(0),
    (torch.cuda, "max_memory_reserved"): _returns(0),
    (torch.cuda, "reset_peak_memory_stats"): _returns(None),
    (torch.cuda, "mem_get_info"): _returns((0, 1)),
    # Random numbers: those of the CPU.
    (torch.cuda, "manual_seed"): torch.manual_seed,
    (torch.cuda, "default_generators"): defaultdict(lambda: torch.default_generator),
    (torch.cuda, "get_rng_state"): lambda *_, **__: torch.get_rng_state(),
    (torch.cuda, "set_rng_state"): lambda state, *_, **__: torch.set_rng_state(state),
    (torch.cuda.random, "get_rng_state"): lambda *_, **__: torch.get_rng_state(),
    (torch.cuda.random, "set_rng_state"): lambda state, *_, **__: torch.set_rng_state(state),
    # gloo scatters the wrong elements of a tensor that is not contiguous, and takes sizes as lists.
    (dist, "scatter"): _scatter_whole,
    (dist, "all_to_all_single"): _exchange_by_lists,
    (torch.jit, "script"): lambda function, **_: function,
    (torch, "compile"): lambda function=None, **_: function or (lambda inner: inner),
}


def emulate() -> None:
    """Replace the functions, if this machine has no GPU."""
    if torch.cuda.is_available():
        return
    for (place, name), stand_in in EMULATED.items():
        setattr(place, name, stand_in)
    _OnCpu().__enter__()
