"""Memory of the generation engine on one rank, and the view that layers have of it in one step.

A page holds ``page_size`` tokens of one request in every attention layer of this stage.  Tensors
are allocated at the first use of a layer, in the width of what the layer stores.  `BatchView`: the
rows of many requests behind each other: ``N`` rows, ``S`` segments; tensors of layers are
[N, 1, ..].  See `KVCache`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from itertools import accumulate

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.config.errors import ConfigError
from megatron.core.device import cpu_kernels, host_array
from megatron.core.fusions.paged_attention import (
    SCALE_BYTES,
    PagedBatch,
    gather,
    paged_attention,
    reads_host,
    store,
)
from megatron.core.inference.paged_engine.request import FIRST_ID, PLACE_BITS, PromptImage
from megatron.core.inference.paged_engine.step_plan import (
    NO_INTEGERS,
    Admission,
    Integers,
    Segment,
    StepPlan,
)
from megatron.core.models.multimodal.qwen2_vl_model import MERGE
from megatron.core.models.multimodal.splicing import splice
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.kv_cache import Core, PositionBias, State
from megatron.core.transformer.module import is_plain


class PagedCache:
    """``num_pages`` pages and ``max_requests`` slots, and one more of each for idle steps.

    ``dtype`` of keys and values; None: the dtype of the model.  Pages in int8 hold the rows of
    `fusions.paged_attention`.  ``state_dtypes`` of the tensors of a recurrent state; None: the
    dtypes of the first state.  `state` returns these dtypes in any case.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        max_requests: int,
        dtype: torch.dtype | None = None,
        state_dtypes: Sequence[torch.dtype | None] = (None, None),
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.max_requests = max_requests
        self.dtype = dtype
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.state_dtypes = state_dtypes
        self.states: dict[int, State] = {}  # recurrent states of all slots, by layer
        self._computed_dtypes: list[torch.dtype] = []
        # By layer and slot: keys and values [k, b, g, d] of a sequence that the slot attends to.
        self.others: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def allocate(self, like: PagedCache) -> None:
        """Allocate all that ``like`` has been used for, in the sizes of this cache.

        Raises RuntimeError or MemoryError for lack of memory.
        """
        for index, (keys, values) in like._layers.items():
            self._layers[index] = (self._pages(keys), self._pages(values))
        self._computed_dtypes = like._computed_dtypes
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
        kept = zip(self.states[layer_index], self._computed_dtypes, strict=True)
        return tuple(of_all[slots].to(dtype) for of_all, dtype in kept)

    def keep_state(self, layer_index: int, slots: Sequence[int], state: State) -> None:
        """Replace the recurrent states of ``slots``."""
        if layer_index not in self.states:
            self._computed_dtypes = [part.dtype for part in state]
            self.states[layer_index] = self._slots(state)
        for kept, part in zip(self.states[layer_index], state, strict=True):
            kept[slots] = part.to(kept.dtype)

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

    def _slots(self, like: State) -> State:
        shapes = ((self.max_requests + 1, *part.shape[1:]) for part in like)
        return tuple(
            part.new_zeros(shape, dtype=dtype or part.dtype)
            for part, shape, dtype in zip(like, shapes, self.state_dtypes, strict=True)
        )

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


class SlotPositions:
    """Positions that rotate the rows of ``num_slots`` slots (LongRoPE, M-RoPE).

    ``start_lengths`` [slots]: tokens of the request when it started (LongRoPE).  ``has_grid``:
    rows have a time, a height and a width (M-RoPE).  The three are equal for text; text after an
    image begins at the image's first position plus the larger of its height and width.
    """

    def __init__(self, num_slots: int, *, has_grid: bool = False) -> None:
        self.has_grid = has_grid
        self.start_lengths: Integers = np.zeros(num_slots, dtype=np.int64)
        self._grids: dict[int, Integers] = {}  # by slot: see `grid_of_prompt`
        self._ends: Integers = np.zeros(num_slots, dtype=np.int64)  # these rows
        self._offsets: Integers = np.zeros(num_slots, dtype=np.int64)  # of the rows after them

    def admit(self, admission: Admission) -> None:
        """Take the positions of a request; its slot forgets the request before it."""
        slot = admission.slot
        self.start_lengths[slot] = admission.start_length
        if not self.has_grid:
            return
        self._grids.pop(slot, None)
        self._ends[slot] = self._offsets[slot] = 0
        if admission.images:
            grid = self._grids[slot] = grid_of_prompt(admission.images, admission.image_starts)
            self._ends[slot] = grid.shape[1] - 1
            self._offsets[slot] = grid[0, -1] - self._ends[slot]

    def grid(self, positions: Integers, slots: Integers) -> Integers:
        """Return time, height and width [3, N] of the rows at ``positions`` of ``slots`` [N]."""
        out = np.tile(positions + self._offsets[slots], (3, 1))
        is_before = positions < self._ends[slots]
        for slot in np.unique(slots[is_before]).tolist():
            mine = is_before & (slots == slot)
            out[:, mine] = self._grids[slot][:, positions[mine]]
        return out


def grid_of_prompt(images: Sequence[PromptImage], starts: Sequence[int]) -> Integers:
    """Return time, height and width of the rows up to the last image and of the next one: [3, n].

    ``starts``: the first row of each image.
    """
    hidden = [0, *accumulate(image.num_rows - 1 for image in images)]  # rows without a token
    tokens = [start - count for start, count in zip(starts, hidden, strict=False)]
    # Not a list with an item for each token: the engine's other requests wait meanwhile.
    found = torch.zeros(1, tokens[-1] + 2, 3, dtype=torch.int64)
    found[0, tokens] = torch.tensor([image.size for image in images])
    found[..., 1:] //= MERGE
    counts = found.prod(-1)
    grid: Integers = splice(counts > 0, counts).grid_positions(found)[:, 0].numpy()
    return grid


class BatchView:
    """Keys, values and states of the requests of one plan; implements `KVCache`.

    ``slots``: positions in each slot.  ``sources``: slot and number of tokens of each sequence that
    the encoder has read in this step.  ``row_invariant``: recurrent layers run each request alone,
    so that its bits do not depend on the others.  ``width`` of the block table: for a graph, which
    calls `prepare` itself; it reads the integers of the rows from `integers`, which are ``into`` if
    given.  ``sees_images_whole``: the rows of an image attend to all of them; none is missing.
    """

    def __init__(
        self,
        cache: PagedCache,
        plan: StepPlan,
        device: torch.device,
        *,
        slots: SlotPositions,
        sources: Sequence[tuple[int, int]] = (),
        row_invariant: bool = False,
        sees_images_whole: bool = False,
        width: int | None = None,
        into: Tensor | None = None,
    ) -> None:
        self._cache = cache
        self._segments = plan.segments
        self._sources = sources
        self._row_invariant = row_invariant
        self._depth = 0
        self.reads_host = False  # whether a layer has read the numbers of the plan on the host
        self.hidden: Tensor | None = None  # of all rows, after the last layer [N, 1, h]
        numbers, first, tokens, pages, targets, *_ = zip(*plan.segments, strict=True)
        starts = np.array(first)
        lengths, num_pages, num_outputs = (
            np.array([*map(len, arrays)]) for arrays in (tokens, pages, targets)
        )
        first_row = np.concatenate([[0], lengths.cumsum()])
        self._rows = list(map(slice, first_row[:-1].tolist(), first_row[1:].tolist()))
        of_row = np.arange(len(lengths)).repeat(lengths)
        positions = _count_up(starts, lengths)
        table = np.zeros((len(lengths), width or num_pages.max()), np.int64)
        table[np.arange(table.shape[1]) < num_pages[:, None]] = np.concatenate(pages)
        page_of, offsets = np.divmod(positions, cache.page_size)
        at = table[of_row, page_of] * cache.page_size + offsets
        slot_of_row = np.array(numbers)[of_row]
        contexts = np.maximum(positions + 1, slots.start_lengths[slot_of_row])
        grid = slots.grid(positions, slot_of_row).ravel() if slots.has_grid else NO_INTEGERS
        outputs = _count_up(first_row[1:] - num_outputs, num_outputs)
        self.host_ids = np.concatenate(tokens)
        self._masks: list[Tensor | None] | None = None
        if sees_images_whole and (self.host_ids >= FIRST_ID).any():
            self._masks = [_mask_with_images(s, device) for s in plan.segments]
        rows = (
            self.host_ids,
            positions,
            contexts,
            at,
            outputs,
            first_row,
            starts + lengths,
            table.ravel(),
            grid,
        )
        # One copy to the device, which the host does not wait for.
        whole = host_array(torch.from_numpy(np.concatenate(rows)), device)
        if into is None:
            into = whole.to(device, non_blocking=True)
        else:
            into.copy_(whole, non_blocking=True)
        self.integers = into
        uploaded = into.split([len(x) for x in rows])
        self.token_ids, self._positions, self._contexts, self._at, self._outputs = uploaded[:5]
        self._indices = (*uploaded[5:7], uploaded[7].view(table.shape))
        # Time, height and width of the rows with M-RoPE: [3, 1, N].
        self.grid = uploaded[8].view(3, 1, -1) if slots.has_grid else None
        self._batch: PagedBatch | None = None
        if width is None:
            self.prepare()

    def prepare(self) -> None:
        """Convert the indices of this step for the kernels."""
        self._batch = PagedBatch(*(x.int() for x in self._indices))

    def at_depth(self, depth: int) -> BatchView:
        """Return these rows for a layer with entries of its own, ``depth`` behind those of now.

        MTP layers have the layer index of the last layer; the first depth is 1.
        """
        view = copy(self)
        view._depth += depth
        return view

    def positions(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Return the positions and context lengths of the rows: 2 x [N]."""
        assert num_tokens == len(self._positions), "a pass has the rows of its plan"
        return self._positions, self._contexts

    def attend(
        self,
        layer_index: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        core: Core,
        *,
        mask: Tensor | None = None,
        bias: PositionBias | None = None,
    ) -> Tensor:
        """Store keys and values in pages and attend causally within each request."""
        assert mask is None, "requests are causal"
        keys, values = self._cache.layer(layer_index + self._depth, key, value)
        store(keys, values, key[:, 0], value[:, 0], self._at)
        if not value.shape[-1]:
            values = keys
        is_paged = bias is None and self._masks is None
        if is_paged and isinstance(core, DotProductAttention) and is_plain(core):
            rule = core.paged_rule(query)
            assert self._batch is not None, "the pass has called prepare()"
            given = (query[:, 0], keys, values, self._batch)
            if cpu_kernels.is_recording() and reads_host(*given):
                self.reads_host = True
            out = paged_attention(*given, rule)
            return out.flatten(1).unsqueeze(1)
        self.reads_host = True
        parts = []
        masks = self._masks or [None] * len(self._segments)
        for segment, rows, hidden in zip(self._segments, self._rows, masks, strict=True):
            k, v = (self._gathered(x, segment).to(query.dtype) for x in (keys, values))
            table = None if bias is None else bias(segment.start, len(segment.tokens), len(k))
            parts.append(core(query[rows], k, v, hidden, attention_bias=table))
        return torch.cat(parts)

    def attend_to_other(
        self,
        layer_index: int,
        query: Tensor,
        project: Callable[[], tuple[Tensor, Tensor]],
        core: Core,
        *,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Attend to the sequence that the encoder has read for each request."""
        assert mask is None, "sources have no padding"
        self.reads_host = True
        if self._sources:
            lengths = [length for _, length in self._sources]
            keys, values = (x.split(lengths) for x in project())
            for (slot, _), k, v in zip(self._sources, keys, values, strict=True):
                self._cache.others[layer_index, slot] = k, v
        return torch.cat(
            [
                core(query[rows], *self._cache.others[layer_index, segment.slot])
                for segment, rows in zip(self._segments, self._rows, strict=True)
            ]
        )

    def scan(
        self,
        layer_index: int,
        rows: State,
        step: Callable[[State, State | None], tuple[Tensor, State]],
    ) -> Tensor:
        """Scan each request from the state of its slot; single tokens go through as one batch."""
        self.reads_host = True
        parts: list[Tensor] = [rows[0]] * len(self._segments)
        single = []
        for i, (segment, of_segment) in enumerate(zip(self._segments, self._rows, strict=True)):
            if segment.start and len(segment.tokens) == 1 and not self._row_invariant:
                single.append(i)
                continue
            past = self._cache.state(layer_index, [segment.slot]) if segment.start else None
            parts[i], state = step(tuple(x[of_segment] for x in rows), past)
            self._cache.keep_state(layer_index, [segment.slot], state)
        if single:
            slots = [self._segments[i].slot for i in single]
            at = torch.tensor([self._rows[i].start for i in single], device=rows[0].device)
            batch = tuple(x[at].transpose(0, 1) for x in rows)
            out, state = step(batch, self._cache.state(layer_index, slots))
            self._cache.keep_state(layer_index, slots, state)
            for i, row in zip(single, out.transpose(0, 1).unbind(), strict=True):
                parts[i] = row.unsqueeze(0)
        return torch.cat(parts)

    def output_rows(self, hidden: Tensor) -> Tensor:
        """Return the rows that the plan has targets for: [N, 1, h] -> [r, 1, h]."""
        self.hidden = hidden
        return hidden.index_select(0, self._outputs)

    def _gathered(self, pages: Tensor, segment: Segment) -> Tensor:
        """Copy the tokens of a segment's request out of the pages: [t, 1, g, d]."""
        own = torch.from_numpy(segment.pages).to(pages.device)
        return gather(pages, own, 0, segment.num_keys).unsqueeze(1)


def _mask_with_images(segment: Segment, where: torch.device) -> Tensor | None:
    """Return the mask [1, 1, q, k] of later keys but those of the query's image; None for text."""
    ids = torch.from_numpy(segment.tokens)
    is_image = ids >= FIRST_ID
    if not is_image.any():
        return None
    is_first = is_image & ((ids - FIRST_ID) % (1 << PLACE_BITS) == 0)
    image = is_first.cumsum(0) + 1  # 1: an image whose first rows are in the cache
    is_same = (image.unsqueeze(1) == image) & is_image.unsqueeze(1) & is_image
    later = torch.ones_like(is_same).triu(1) & ~is_same
    return F.pad(later, (segment.start, 0))[None, None].to(where)


def _count_up(starts: Integers, lengths: Integers) -> Integers:
    """Return the ranges of ``lengths`` numbers from ``starts`` on, behind each other."""
    before = lengths.cumsum() - lengths
    return (starts - before).repeat(lengths) + np.arange(lengths.sum())
