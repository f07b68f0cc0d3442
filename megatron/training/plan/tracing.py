"""Counts what code allocates and sends while it runs, tensor by tensor.

The same counter serves real tensors and tensors without memory (meta, or fake).  It sees storages:
views cost nothing, and a storage counts until its last tensor has gone.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.core.param_info import local_part
from megatron.training.plan.cost import Collective

_aten: Any = torch.ops.aten
_KINDS = {
    "allreduce_": "all-reduce",
    "_allgather_base_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "alltoall_base_": "all-to-all",
    "broadcast_": "broadcast",
    "send": "send",
}


class Measured(NamedTuple):
    """Bytes above what was alive before: at most, and afterwards; and what was sent."""

    peak: int
    kept: int
    sent: Counter[Collective]


class Tracker(TorchDispatchMode):
    """``alive`` and ``peak`` bytes of storages made inside, and ``collectives``."""

    def __init__(self, existing: Iterable[Tensor] = ()) -> None:
        """Views of ``existing`` tensors count as nothing."""
        super().__init__()
        self.alive = self.peak = 0
        self.collectives: Counter[Collective] = Counter()
        self._seen = {_storage(tensor)._cdata for tensor in existing}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler, which takes a second, to be told to skip it

    def measure(self, function: Callable[[], object]) -> Measured:
        """Call ``function`` (inside the tracker) and say what it took."""
        before, sent = self.alive, Counter(self.collectives)
        self.peak = before
        function()
        return Measured(self.peak - before, self.alive - before, self.collectives - sent)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        if func is _aten._local_scalar_dense.default and args[0].is_meta:
            return 1  # a norm that is finite, a check that holds
        if func.namespace == "c10d":
            self._note_collective(func, args)
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._note(tensor)
        return out

    def _note(self, tensor: Tensor) -> None:
        storage = _storage(tensor)
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen:
            return
        self._seen.add(key)
        self.alive += size
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self.alive -= size
        self._seen.discard(key)

    def _note_collective(self, func: Any, args: tuple[Any, ...]) -> None:
        kind = _KINDS.get(func.name().split("::")[1].split(".")[0])
        groups = [a for a in args if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a)]
        if kind is None or not groups:
            return
        group = dist.ProcessGroup.unbox(groups[0])
        tensors = [t for t in tree_leaves(args) if isinstance(t, Tensor)]
        size = max(t.numel() * t.element_size() for t in tensors)
        self.collectives[Collective(kind, group.group_name, group.size(), size)] += 1


class FusedAttentionOnMeta(TorchFunctionMode):
    """torch's choice of an attention kernel goes by the device, and finds none for meta.

    What kernels keep for backward does not differ: the output and a log-sum-exp.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention or not args[0].is_meta:
            return func(*args, **kwargs)
        return _aten._scaled_dot_product_flash_attention_for_cpu(
            *args,
            kwargs["dropout_p"],
            kwargs["is_causal"],
            attn_mask=kwargs["attn_mask"],
            scale=kwargs["scale"],
        )[0]


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Memory behind ``tensors``, each storage once."""
    storages = [_storage(tensor) for tensor in tensors]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return local_part(tensor).untyped_storage()
