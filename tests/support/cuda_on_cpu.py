"""Emulate on a CPU the calls of torch.cuda that NVIDIA's Megatron Core makes unconditionally."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def emulate_cuda() -> None:
    """Replace functions of torch.cuda, and CUDA devices as arguments, by the CPU's."""
    cuda = torch.cuda
    for module in (cuda, cuda.random):
        module.get_rng_state = lambda *_, **__: torch.get_rng_state()
        module.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    cuda.manual_seed = torch.manual_seed
    cuda.current_device = lambda: 0
    cuda.device_count = lambda: 1
    cuda.default_generators = [torch.default_generator]
    cuda._lazy_call = lambda function, **_: function()
    for name in ("set_device", "synchronize", "empty_cache", "_lazy_init"):
        setattr(cuda, name, lambda *_: None)
    cuda.is_initialized = lambda: True
    cuda.Stream = cuda.Event = cuda.stream = _NoStream
    cuda.current_stream = _NoStream
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *_, **__: self
    move = _on_cpu(torch.Tensor.to)
    torch.Tensor.to = lambda self, *args, **kwargs: move(
        self, *("cpu" if type(a) is int else a for a in args), **kwargs
    )
    for name in ("new_empty", "new_zeros", "new_ones", "new_full"):
        setattr(torch.Tensor, name, _on_cpu(getattr(torch.Tensor, name)))
    kind = torch.Tensor.type
    torch.Tensor.type = lambda self, *args: (
        kind(self, *args) if args else kind(self).replace("torch.", "torch.cuda.")
    )
    exchange = dist.all_to_all_single
    dist.all_to_all_single = lambda *args, **kwargs: exchange(
        *args, **{k: v.tolist() if torch.is_tensor(v) else v for k, v in kwargs.items()}
    )
    torch.compile = lambda function=None, **_: function or (lambda inner: inner)
    makers = "empty zeros ones full tensor arange randn rand eye randint linspace as_tensor"
    for name in (*makers.split(), "empty_like", "zeros_like", "ones_like"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))


class _NoStream:
    """Takes the place of a CUDA stream or event."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., _NoStream]:
        return lambda *_, **__: self

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def _on_cpu(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Tensor:
        device = kwargs.get("device")
        if isinstance(device, int) or "cuda" in str(device):
            kwargs["device"] = "cpu"
        is_text = [isinstance(a, str | torch.device) and "cuda" in str(a) for a in args]
        return make(*("cpu" if yes else a for yes, a in zip(is_text, args, strict=True)), **kwargs)

    return made
