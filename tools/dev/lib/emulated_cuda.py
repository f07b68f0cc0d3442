"""Calls of torch.cuda that answer for the CPU, for projects that call them without asking.

`EMULATED` lists each function that `emulate` replaces; the files of a project stay as they are.
With a GPU nothing is replaced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
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

    def record(self, *args: object) -> _Nothing:
        """Do nothing, as every method here."""
        return self

    wait = synchronize = wait_stream = wait_event = record_event = record

    def elapsed_time(self, other: object) -> float:
        """Return no time."""
        return 0.0

    def query(self) -> bool:
        """Return that everything has ended."""
        return True


def _same(value: Any, *args: object, **kwargs: object) -> Any:
    return value


_scatter = torch.distributed.scatter


def _scatter_whole(
    tensor: torch.Tensor, scatter_list: list[torch.Tensor] | None = None, **more: Any
) -> Any:
    shares = scatter_list and [share.contiguous() for share in scatter_list]
    return _scatter(tensor, shares, **more)


def _on_cpu(create: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def created(*args: Any, pin_memory: bool = False, **more: Any) -> Any:
        return create(*map(_cpu_for, args), **{k: _cpu_for(v) for k, v in more.items()})

    return created


def _cpu_for(value: Any) -> Any:
    """Return the CPU in place of a GPU, and other arguments as they are."""
    is_device = isinstance(value, str | torch.device)
    return CPU if is_device and str(value).startswith("cuda") else value


def _returns(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


# (object, name of the function) -> what takes its place.
EMULATED: dict[tuple[Any, str], Any] = {
    # Devices: the CPU is the current one.
    (torch.cuda, "current_device"): _returns(CPU),
    (torch.cuda, "device_count"): _returns(1),
    (torch.cuda, "set_device"): _returns(None),
    (torch.cuda, "device"): _Nothing,
    (torch.Tensor, "cuda"): _same,
    (torch.Tensor, "to"): _on_cpu(torch.Tensor.to),
    (torch.nn.Module, "cuda"): _same,
    # Streams and events: work is done when a call returns.
    (torch.cuda, "Stream"): _Nothing,
    (torch.cuda, "Event"): _Nothing,
    (torch.cuda, "stream"): _Nothing,
    (torch.cuda, "current_stream"): _returns(_Nothing()),
    (torch.cuda, "default_stream"): _returns(_Nothing()),
    (torch.cuda, "synchronize"): _returns(None),
    # Memory: none is used on a GPU; pinned memory is memory.
    (torch.cuda, "empty_cache"): _returns(None),
    (torch.cuda, "memory_allocated"): _returns(0),
    (torch.cuda, "memory_reserved"): _returns(0),
    (torch.cuda, "max_memory_allocated"): _returns(0),
    (torch.cuda, "max_memory_reserved"): _returns(0),
    (torch.cuda, "reset_peak_memory_stats"): _returns(None),
    (torch.cuda, "mem_get_info"): _returns((0, 1)),
    (torch.Tensor, "pin_memory"): _same,
    (torch, "empty"): _on_cpu(torch.empty),
    (torch, "tensor"): _on_cpu(torch.tensor),
    (torch, "zeros"): _on_cpu(torch.zeros),
    # Its functions may create tensors, by the functions that are replaced.
    (torch.jit, "script"): _same,
    (torch.Tensor, "record_stream"): _returns(None),
    # gloo scatters the wrong elements of a tensor that is not contiguous; NCCL the right ones.
    (torch.distributed, "scatter"): _scatter_whole,
    # Random numbers: those of the CPU.
    (torch.cuda, "get_rng_state"): lambda *args: torch.get_rng_state(),
    (torch.cuda, "set_rng_state"): lambda state, *args: torch.set_rng_state(state),
}


def names() -> list[str]:
    """Return the names of the functions that are replaced."""
    return [
        f"{place.__module__ if isinstance(place, type) else ''}{_name(place)}.{name}"
        for place, name in EMULATED
    ]


def _name(place: Any) -> str:
    return f".{place.__qualname__}" if isinstance(place, type) else place.__name__


def emulate() -> None:
    """Replace the functions, if this machine has no GPU; say so."""
    if torch.cuda.is_available():
        return
    for (place, name), stand_in in EMULATED.items():
        setattr(place, name, stand_in)
    with contextlib.suppress(AttributeError):
        torch.cuda.nvtx = _Nothing()
    print(f"emulated: {', '.join(names())}")
