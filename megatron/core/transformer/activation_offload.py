"""Activation offloading to host memory, for the first layers of a stack or modules of layers.

Offload: the tensors that a layer saves for backward are copied to the host on a side stream while
the layer computes; their device memory is freed after the next layer's forward pass.  Reload: they
are copied back while backward runs the next layer.  So the device holds the saved tensors of two
offloaded layers at a time, and it stalls only where copying takes longer than computing a layer.

Not offloaded: parameters, inputs that all layers share, and storages below `MIN_BYTES`.  A storage
that is saved twice, as several views or by two consecutive layers, is copied once.

--cpu-offloading takes all that the first layers save.  --fine-grained-activation-offloading takes
what the modules of --offload-modules save, in all layers but the last, which backward needs first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core import device
from megatron.core.transformer.cuda_graphs import Shared, tensors_in

MIN_BYTES = 1 << 20  # smaller storages are not worth a copy
# Modules of --offload-modules: patterns of the methods of a layer's modules that save for them.
MODULES = {
    "attn_norm": r"input_layernorm\.forward",
    "qkv_linear": r"self_attention\.linear_(qkv|q_|kv_)[^.]*\.forward",
    "core_attn": r"self_attention\.core_attention\.forward",
    "attn_proj": r"self_attention\.linear_proj\.forward",
    "mlp_norm": r"pre_mlp_layernorm\.forward",
    "expert_fc1": r"mlp\.experts\.(_grouped|(.*\.)?linear_fc1\.forward)",
    "moe_act": r"mlp\.experts\.(.*\.)?activate",
}


class _OffloadedStorage:
    """An offloaded storage: its bytes are on the device before `leave` and after `come_back`."""

    def __init__(self, tensor: Tensor, stream: device.Stream | None) -> None:
        self._stream = stream
        self._came: device.Event | None = None
        empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        self._on_device: Tensor | None = empty.set_(tensor.untyped_storage())
        self.num_bytes = self._on_device.numel()
        self._on_host: Tensor | None = None
        if not tensor.is_meta:  # the memory planner counts device memory only: nothing to copy
            device.wait_stream(stream)
            with device.on_stream(stream):
                self._on_host = device.host_like(self._on_device, torch.uint8, pin=True)
                self._on_host.copy_(self._on_device, non_blocking=True)
                self._left = device.record_event()

    def leave(self) -> None:
        """Free the device memory; the current stream waits for the copy to the host first."""
        if self._on_host is not None:
            device.wait_event(self._left)
        self._on_device = None

    def come_back(self) -> None:
        """Start the copy to the device, unless it was started before."""
        if self._on_device is not None:
            return
        # Allocate on the current stream, which also uses and frees the memory.
        on_device = torch.empty(self.num_bytes, dtype=torch.uint8, device=device.current())
        if self._on_host is not None:
            device.wait_stream(self._stream)
            with device.on_stream(self._stream):
                on_device.copy_(self._on_host, non_blocking=True)
                self._came = device.record_event()
        self._on_device = on_device

    def restored(self, dtype: torch.dtype, place: tuple[Any, ...]) -> Tensor:
        """Return a tensor as it was saved; ``place``: its offset, shape and strides.

        The current stream waits for the copy to the device.
        """
        self.come_back()
        device.wait_event(self._came)
        assert self._on_device is not None, "it has come back"
        empty = torch.empty(0, dtype=dtype, device=self._on_device.device)
        return empty.set_(self._on_device.untyped_storage(), *place)


class _Pass:
    """The offloaded storages of one micro-batch, by layer.

    ``staying``: tensors whose storages are not offloaded; of others those that it ``takes``.
    """

    def __init__(
        self,
        staying: Iterable[Tensor],
        stream: device.Stream | None,
        takes: Callable[[Tensor], bool],
    ) -> None:
        self._staying = {t.untyped_storage()._cdata for t in staying}
        self._takes = takes
        self._stream = stream
        self._layers: list[list[_OffloadedStorage]] = []
        # Storages on the device, by (storage, version); the entry keeps the storage alive, so that
        # its address identifies it.
        self._leaving: dict[tuple[int, int], _OffloadedStorage] = {}

    def saving(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Return the context manager in which the next layer runs; offloads what it saves."""
        self._layers.append([])
        return torch.autograd.graph.saved_tensors_hooks(self._hold, lambda saved: saved())

    def leave(self, layer: int) -> None:
        """Free the device memory of the storages that ``layer`` saved."""
        gone = set(self._layers[layer])
        self._leaving = {k: s for k, s in self._leaving.items() if s not in gone}
        for offloaded in gone:
            offloaded.leave()

    def come_back(self, layers: Sequence[int], _: Tensor) -> None:
        """Start to copy back the storages of ``layers``; a gradient hook, hence the argument."""
        for layer in layers:
            for offloaded in self._layers[layer]:
                offloaded.come_back()
            self._layers[layer] = []  # autograd's reference is the last: it frees them after use

    def _hold(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Return a function that returns ``tensor``; it may have been offloaded meanwhile."""
        if type(tensor) is not Tensor or tensor.layout != torch.strided:
            return lambda: tensor
        storage = tensor.untyped_storage()
        if not self._takes(tensor) or storage._cdata in self._staying:
            return lambda: tensor
        key = storage._cdata, tensor._version  # an in-place write changes the bytes and the version
        offloaded = self._leaving.get(key)
        if offloaded is None:
            with torch.no_grad():
                offloaded = self._leaving[key] = _OffloadedStorage(tensor, self._stream)
        if offloaded not in self._layers[-1]:
            self._layers[-1].append(offloaded)
        # Refers to the offloaded storage, and not to the tensor.
        place = tensor.storage_offset(), tensor.shape, tensor.stride()
        return partial(offloaded.restored, tensor.dtype, place)


class ActivationOffload:
    """Runs a stack of layers and offloads the activations of its first ``num_layers`` layers."""

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers
        self._stream: device.Stream | None = None

    def takes(self, tensor: Tensor) -> bool:
        """Return whether a tensor that a layer saves now is offloaded."""
        return tensor.untyped_storage().nbytes() >= MIN_BYTES

    def run(self, layers: Iterable[nn.Module], hidden_states: Tensor, shared: Shared) -> Tensor:
        """Run all layers: [s, b, h] -> [s, b, h].  ``shared``: the inputs that all layers share."""
        self._stream = self._stream or device.side_stream()
        layers = list(layers)
        params = (p for layer in layers for p in layer.parameters())
        going = _Pass([*params, *tensors_in(shared)], self._stream, self.takes)
        last = len(layers) - 1
        for i, layer in enumerate(layers):
            with going.saving() if i < self.num_layers else nullcontext():
                hidden_states, _ = layer(hidden_states, **shared)
            due = [j for j in ((i, i - 1) if i == last else (i - 1,)) if 0 <= j < self.num_layers]
            for j in reversed(due):
                going.leave(j)
            if due and hidden_states.requires_grad:
                hidden_states.register_hook(partial(going.come_back, due))
        return hidden_states


class ModuleOffload(ActivationOffload):
    """Offloads what ``modules`` (names of `MODULES`) of the layers save.

    ``fraction``: of the layers but the last.  Tensors of fewer than ``min_numel`` values stay.
    """

    def __init__(
        self, layers: nn.ModuleList, modules: Sequence[str], fraction: float, min_numel: int
    ) -> None:
        super().__init__(round(fraction * (len(layers) - 1)))
        self._min_numel = min_numel
        self._depth = 0  # of calls of the modules that run now
        pattern = "|".join(MODULES[name] for name in modules)
        for layer in [*layers][: self.num_layers]:
            for name, module in layer.named_modules():
                # Not hooks of modules, which see no other method than forward.
                for method in ("forward", "activate", "_grouped"):
                    if hasattr(module, method) and re.fullmatch(pattern, f"{name}.{method}"):
                        setattr(module, method, self._marked(getattr(module, method)))

    def takes(self, tensor: Tensor) -> bool:
        return self._depth > 0 and tensor.numel() >= self._min_numel

    def _marked(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def marked(*args: Any, **more: Any) -> Any:
            # `Experts._grouped` gets the name of the layer that it computes.
            num_calls = int(not any(isinstance(x, str) and x == "linear_fc2" for x in args))
            self._depth += num_calls
            try:
                return call(*args, **more)
            finally:
                self._depth -= num_calls

        return marked
