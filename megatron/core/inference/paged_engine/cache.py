"""Memory of the generation engine on one rank: pages of keys and values, and state per slot.

A page holds ``page_size`` tokens of one request in every attention layer of this stage.  Tensors
are allocated at the first use of a layer, in the width of what the layer stores.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.core.config.errors import ConfigError
from megatron.core.fusions.paged_attention import SCALE_BYTES
from megatron.core.transformer.kv_cache import State


class PagedCache:
    """``num_pages`` pages and ``max_requests`` slots, and one more of each for idle steps.

    ``dtype`` of keys and values; None: that of the model.  With int8 pages have the rows of
    `fusions.paged_attention`.
    """

    def __init__(
        self, num_pages: int, page_size: int, max_requests: int, dtype: torch.dtype | None = None
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.max_requests = max_requests
        self.dtype = dtype
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.states: dict[int, State] = {}  # recurrent states of all slots, by layer
        # By layer and slot: keys and values [k, b, g, d] of a sequence that the slot attends to.
        self.others: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def allocate(self, like: PagedCache) -> None:
        """Allocate all that ``like`` has been used for, in the sizes of this cache.

        Raises RuntimeError or MemoryError for lack of memory.
        """
        for index, (keys, values) in like._layers.items():
            self._layers[index] = (self._pages(keys), self._pages(values))
        for index, state in like.states.items():
            self.states[index] = self._slots(state)

    def layer(self, layer_index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the pages of a layer, [num_pages + 1, page_size, g, d], made for ``key``.

        Raises ConfigError if rows of ``dtype`` cannot have its width.
        """
        if layer_index not in self._layers:
            key, value = (self._stored(x) for x in (key, value))
            self._layers[layer_index] = (self._pages(key), self._pages(value))
        return self._layers[layer_index]

    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy pages (from, to) in all layers."""
        if not copies:
            return
        source, target = (list(pages) for pages in zip(*copies, strict=True))
        for tensors in self._layers.values():
            for pages in tensors:
                pages[target] = pages[source]

    def state(self, layer_index: int, slots: Sequence[int]) -> State:
        """Return the recurrent states of ``slots``: tensors [len(slots), ..]."""
        return tuple(kept[slots] for kept in self.states[layer_index])

    def keep_state(self, layer_index: int, slots: Sequence[int], state: State) -> None:
        """Replace the recurrent states of ``slots``."""
        if layer_index not in self.states:
            self.states[layer_index] = self._slots(state)
        for kept, part in zip(self.states[layer_index], state, strict=True):
            kept[slots] = part

    def clear(self) -> None:
        """Free all memory."""
        self._layers.clear()
        self.states.clear()
        self.others.clear()

    @property
    def bytes_per_page(self) -> int:
        """Number of bytes of one page in all layers that have been used."""
        tensors = [x for pair in self._layers.values() for x in pair]
        return sum(x.nbytes // x.shape[0] for x in tensors)

    @property
    def num_bytes(self) -> int:
        """Number of bytes allocated."""
        kept = (*self._layers.values(), *self.states.values(), *self.others.values())
        return sum(x.nbytes for tensors in kept for x in tensors)

    def _slots(self, like: State) -> State:
        return tuple(part.new_zeros(self.max_requests + 1, *part.shape[1:]) for part in like)

    def _stored(self, like: Tensor) -> Tensor:
        """Return an empty tensor with the dtype and width of ``like`` in pages."""
        width = like.shape[-1]
        dtype = self.dtype or like.dtype
        if dtype == torch.int8 and width:  # width 0: the keys are the values too
            if width % SCALE_BYTES:
                raise ConfigError(
                    f"--inference-kv-cache-dtype int8: keys or values of {width} channels are not "
                    f"a multiple of {SCALE_BYTES}; use bf16"
                )
            width += SCALE_BYTES
        return like.new_empty((0, *like.shape[1:-1], width), dtype=dtype)

    def _pages(self, like: Tensor) -> Tensor:
        shape = (self.num_pages + 1, self.page_size, *like.shape[2:])
        return torch.empty(shape, dtype=like.dtype, device=like.device)
