"""DeepSeek Sparse Attention (DSA): latent attention to the keys that an indexer selects.

Source: DeepSeek-V3.2.  Queries run in blocks: the indexer scores the visible keys of a block, the
largest scores become a mask, and the layer's usual core attends with it, so that neither scores nor
masks of a complete sequence are in memory at once.  A block whose queries see at most
--dsa-indexer-topk keys needs no mask.

``s`` local tokens, ``b`` sequences, ``n`` local heads, ``q`` queries of a block, ``k`` keys up to
its end; see lightning_indexer.py.  Layers with --dsa-indexer-topk-freq above 1 take the masks of
an earlier layer from ``selections``, a dictionary of one forward pass, which backward keeps alive
for recomputation.

Collectives: with context parallelism, an all-gather over cp of keys and values and one of index
keys, in backward a reduce-scatter of each; for the indexer's loss an all-reduce over tp of the
probabilities of each block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.aux_loss import AuxLosses
from megatron.core.config.errors import ConfigError
from megatron.core.fusions.causal_attention import BLOCK
from megatron.core.fusions.rope import RotaryTable
from megatron.core.packed_seq_params import AttentionMask, PackedBounds, PackedSeqParams
from megatron.core.parallel.context_parallel_partition import (
    Span,
    held_spans,
    order_of_gathered,
    row_lengths,
)
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.tensor_parallel.random import checkpoint
from megatron.core.transformer.attention_blocks import QKV
from megatron.core.transformer.context_parallel import AttentionContext
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.kv_cache import KVCache
from megatron.core.transformer.layer_layout import indexer_of_layer
from megatron.core.transformer.lightning_indexer import (
    IndexVectors,
    LightningIndexer,
    backward_scores,
    divergence,
    index_scores,
    loss_of,
    select,
)
from megatron.core.transformer.module import WithBias
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

LOSS_NAME = "indexer_loss"
_VALUES_AT_ONCE = 1 << 24  # of the scores of all heads in a block
_QUERIES = 256  # maximum of a block; with fewer, less is computed above the diagonal
Selections = dict[int, list[Tensor | None]]  # by layer index: the mask [b, q, k] of each block


class _Block(NamedTuple):
    """Queries ``rows`` of this rank, and the ``keys`` up to the last of them."""

    rows: slice
    keys: slice
    first_query: int  # its position in ``keys``

    def hidden(self, hidden: Tensor | None) -> Tensor | None:
        """Return the part of a mask [.., s, keys of all ranks] for this block."""
        return None if hidden is None else hidden[..., self.rows, self.keys]

    def visible(self, hidden: Tensor | None, where: torch.device) -> Tensor:
        """Return the causal mask without ``hidden`` keys: [1 or b, q, k]."""
        queries = self.first_query + torch.arange(self.rows.stop - self.rows.start, device=where)
        keys = torch.arange(self.keys.stop - self.keys.start, device=where)
        causal = (keys <= queries.unsqueeze(1)).unsqueeze(0)
        hidden = self.hidden(hidden)
        return causal if hidden is None else causal & ~hidden[:, 0]


class SparseMLASelfAttention(MLASelfAttention):
    """Multi-latent self attention to selected keys."""

    core_attention: DotProductAttention
    selections: Selections | None = None  # of the running forward pass

    def build_projections(self, submodules: Any) -> None:
        """Build the indexer too, if the layer has its own."""
        super().build_projections(submodules)
        c, index = self.config, self.layer_number - 1
        self.selecting_layer = indexer_of_layer(c, index)
        if self.selecting_layer == index:
            width = c.hidden_size if c.q_lora_rank is None else c.q_lora_rank
            indexer = LightningIndexer(c, width, tp_group=self.tp_group)
            self.core_attention.indexer = indexer  # where Megatron-LM's checkpoints have it
            if c.dsa_indexer_loss_coeff:
                self.aux_losses = AuxLosses(index, c.num_layers, self.cp_group)
            else:
                indexer.requires_grad_(False)

    @property
    def indexer(self) -> LightningIndexer | None:
        """The layer's indexer; None if it takes the keys that another layer selects."""
        return getattr(self.core_attention, "indexer", None)

    def forward(
        self, hidden_states: Tensor, attention_mask: Any = None, *args: Any, **more: Any
    ) -> WithBias:
        """See `SelfAttentionBase.forward`; ``selections`` are those of this forward pass."""
        self.selections = more.pop("selections", None)
        return super().forward(hidden_states, attention_mask, *args, **more)

    def extra_of(
        self, hidden_states: Tensor, narrow_query: Tensor, rotary: RotaryTable
    ) -> tuple[Any, ...]:
        """Compute the index vectors of all tokens of this context-parallel rank."""
        if self.indexer is None:
            return ()
        up: Any = getattr(self, "linear_q_up_proj", None)
        if hasattr(up, "normalized"):  # it contains the norm of latent queries
            narrow_query = up.normalized(narrow_query)
        return (self.indexer(hidden_states, narrow_query, rotary),)

    def run_core(
        self,
        qkv: QKV,
        attention_mask: AttentionMask | None,
        attention_bias: Tensor | None,
        packed_seq_params: PackedSeqParams | None,
        extra: IndexVectors | None,
    ) -> Tensor:
        """Attend to selected keys and attach the indexer's loss; see `Attention.run_core`."""
        assert attention_bias is None, "latent attention has no bias of scores"
        selections = {} if self.selections is None else self.selections

        def core(*tensors: Tensor) -> Tensor:
            masks = _MaskLog(selections, self.layer_number - 1, self.selecting_layer)
            return self._attend(masks, attention_mask, packed_seq_params, *tensors)

        tensors = *qkv, *(extra or ())
        if self.checkpoint_core_attention and self.training:
            out: Tensor = checkpoint(core, False, *tensors)
            return out
        return core(*tensors)

    def attend_cached(
        self,
        cache: KVCache,
        qkv: QKV,
        attention_mask: Any,
        attention_bias: Any,
        extra: IndexVectors | None = None,
    ) -> Tensor:
        """Append keys, values and index keys to the cache and attend to selected keys.

        A cache stores one key of a token: latents or keys of all heads, then the index key.
        """
        assert attention_bias is None, "latent attention has no bias of scores"
        shapes = [x.shape[2:] for x in qkv]
        queries, keys, values = (x.flatten(2).unsqueeze(2) for x in qkv)
        if extra is not None:
            added = extra.query.flatten(2).unsqueeze(2), extra.weights.unsqueeze(2)
            queries = torch.cat([queries, *added], -1)
            keys = torch.cat([keys, extra.key.unsqueeze(2)], -1)
        selections = {} if self.selections is None else self.selections
        masks = _MaskLog(selections, self.layer_number - 1, self.selecting_layer)

        def core(query: Tensor, key: Tensor, value: Tensor, mask: Any = None, **_: Any) -> Tensor:
            query, index_query = _split(query, shapes[0])
            key, index_key = _split(key, shapes[1])
            value = _split(value, shapes[2])[0] if shapes[2].numel() else key
            vectors: tuple[Tensor, ...] = ()
            if extra is not None:
                heads = extra.query.shape[2:]
                vectors = *_split(index_query.unsqueeze(2), heads), index_key
            return self._attend(masks, mask, None, query, key, value, *vectors)

        where = self.layer_number - 1
        return cache.attend(where, queries, keys, values, core, mask=attention_mask)

    def _attend(
        self,
        masks: _MaskLog,
        attention_mask: AttentionMask | None,
        packed: PackedSeqParams | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *vectors: Tensor,
    ) -> Tensor:
        """Attend by blocks: [s, b, n, d], 2 x [.., b, n, d] -> [s, b, n d]; see `IndexVectors`."""
        cp, num_rows = self.cp_group, len(query)
        lengths = _lengths(packed, len(key), cp.size())
        if cp.size() > 1:
            order, _ = order_of_gathered(lengths, tuple(range(cp.size())), cp.size(), key.device)
            gathered = (key, value, *vectors[2:])
            key, value, *index_key = (
                gather_from_sequence_parallel_region(x.contiguous(), group=cp)[order]
                for x in gathered
            )
            vectors = *vectors[:2], *index_key
        hidden = attention_mask
        if isinstance(hidden, PackedBounds):
            hidden = hidden.hidden(query.shape[1], len(key))
        context = AttentionContext(is_causal=True, hidden=hidden)
        hidden = context.with_own_rows(num_rows, len(key)).hidden
        spans = held_spans(lengths, cp.rank(), cp.size())
        if num_rows < sum(lengths) and cp.size() == 1:  # a cache has the keys before the queries
            spans = (Span(len(key) - num_rows, len(key), 0, len(key)),)
        learner = None
        if self.training and torch.is_grad_enabled() and hasattr(self, "aux_losses"):
            learner = _Learner(self, IndexVectors(*vectors))
        by_blocks = cp.size() == 1 and self.core_attention.trains_by_blocks(query, context)
        blocks = list(self._blocks(spans, query, BLOCK if by_blocks else 0))
        with torch.no_grad():
            chosen = [
                self._select(block, masks, hidden, learner, query, key, vectors) for block in blocks
            ]
        if by_blocks:
            out = self._attend_in_blocks((query, key, value), spans, chosen)
        else:
            out = self._attend_to_blocks((query, key, value), blocks, chosen, hidden)
        return out if learner is None else learner.attach(out, cp.size())

    def _attend_in_blocks(
        self, qkv: QKV, spans: Sequence[Span], chosen: Sequence[Tensor | None]
    ) -> Tensor:
        """Attend to each sequence by the CPU's kernel for training; a mask for each `BLOCK`."""
        outputs, at = [], 0
        parts = zip(*(x.split([s.stop - s.start for s in spans]) for x in qkv), strict=True)
        for query, key, value in parts:
            count = -(-len(query) // BLOCK)
            masks = chosen[at : at + count]
            outputs.append(self.core_attention.attend_by_blocks(query, key, value, masks))
            at += count
        return torch.cat(outputs)

    def _attend_to_blocks(
        self,
        qkv: QKV,
        blocks: Sequence[_Block],
        chosen: Sequence[Tensor | None],
        hidden: Tensor | None,
    ) -> Tensor:
        """Attend with the core's kernels, block by block."""
        query, key, value = qkv
        if value.shape[-1] < query.shape[-1]:
            value = F.pad(value, (0, query.shape[-1] - value.shape[-1]))
        outputs = []
        for block, mask in zip(blocks, chosen, strict=True):
            if mask is None:
                part = AttentionContext(
                    is_causal=True, hidden=block.hidden(hidden), first_query=block.first_query
                )
            else:
                part = AttentionContext(is_causal=False, hidden=~mask.unsqueeze(1))
            rows = query[block.rows], key[block.keys], value[block.keys]
            outputs.append(self.core_attention.attend(rows, part))
        return torch.cat(outputs)

    def _blocks(self, spans: Sequence[Span], query: Tensor, size: int) -> Iterator[_Block]:
        """Yield blocks of ``size`` queries; 0: as many as memory and the keys allow.

        They are the same in all layers of a forward pass.
        """
        c = self.config
        learns = self.training and c.dsa_indexer_loss_coeff
        heads = max(c.dsa_indexer_n_heads, query.shape[2]) * query.shape[1]
        at = 0
        for span in spans:
            start = span.start
            while start < span.stop:
                count = min(_QUERIES, _VALUES_AT_ONCE // (heads * (start - span.first + _QUERIES)))
                stop = start + (size or max(count, 1))
                if not learns and not size:  # all queries with few keys need no scores
                    stop = max(stop, span.first + c.dsa_indexer_topk)
                stop = min(stop, span.stop)
                rows = slice(at, at + stop - start)
                yield _Block(rows, slice(span.first, stop), start - span.first)
                at, start = rows.stop, stop

    def _select(
        self,
        block: _Block,
        masks: _MaskLog,
        hidden: Tensor | None,
        learner: _Learner | None,
        query: Tensor,
        key: Tensor,
        vectors: tuple[Tensor, ...],
    ) -> Tensor | None:
        """Return the mask of the keys of a block, None for all visible keys.  Without gradients."""
        if self.indexer is None:
            return masks.next()
        topk = self.config.dsa_indexer_topk
        has_choice = block.keys.stop - block.keys.start > topk
        if not has_choice and learner is None:
            return masks.add(None)
        has_relu = self.config.dsa_indexer_scoring_relu
        own = vectors[0][block.rows], vectors[1][block.rows], vectors[2][block.keys]
        scores, products = index_scores(*own, has_relu=has_relu)
        visible = block.visible(hidden, query.device)
        mask = select(scores, visible, topk) if has_choice else None
        if learner is not None:
            over = visible
            if mask is not None and self.config.dsa_indexer_use_sparse_loss:
                over = mask
            qk = query[block.rows], key[block.keys]
            learner.learn(block, qk, own, (scores, products), over)
        return masks.add(mask)


class _MaskLog:
    """The masks of a layer in the order of its blocks: recorded, or those of the layer before."""

    def __init__(self, selections: Selections, layer_index: int, selecting_layer: int) -> None:
        if selecting_layer == layer_index:
            selections[layer_index] = []
        elif selecting_layer not in selections:
            raise ConfigError(
                f"--dsa-indexer-topk-freq: layer {layer_index + 1} takes the keys that layer "
                f"{selecting_layer + 1} selects, which is in another pipeline stage; change the "
                "layers of the stages, or --dsa-indexer-skip-topk-offset"
            )
        self._masks = selections[selecting_layer]
        self._place = 0

    def add(self, mask: Tensor | None) -> Tensor | None:
        """Record the mask of the next block and return it."""
        self._masks.append(mask)
        return mask

    def next(self) -> Tensor | None:
        """Return the recorded mask of the next block."""
        self._place += 1
        return self._masks[self._place - 1]


class _Learner:
    """The indexer's loss of all blocks of a pass, and its gradients."""

    def __init__(self, layer: SparseMLASelfAttention, vectors: IndexVectors) -> None:
        self.layer = layer
        self.vectors = vectors
        wide = torch.promote_types(vectors.key.dtype, torch.float32)
        self._loss = torch.zeros((), dtype=wide, device=vectors.key.device)
        self._grads = IndexVectors(*(torch.zeros_like(x, dtype=wide) for x in vectors))

    def learn(
        self,
        block: _Block,
        query_key: tuple[Tensor, Tensor],
        own: tuple[Tensor, Tensor, Tensor],
        scored: tuple[Tensor, Tensor],
        mask: Tensor,
    ) -> None:
        """Add the divergence of a block over the keys of ``mask``.  Collective over tp."""
        scores, products = scored
        target = self._probabilities(*query_key, mask)
        loss, gradient = divergence(scores, target.to(scores.dtype), mask)
        has_relu = self.layer.config.dsa_indexer_scoring_relu
        grads = backward_scores(gradient, own, products, has_relu=has_relu)
        self._loss += loss
        places = block.rows, block.rows, block.keys
        for total, place, grad in zip(self._grads, places, grads, strict=True):
            total[place] += grad

    def attach(self, out: Tensor, num_shards: int) -> Tensor:
        """Return ``out``, whose backward pass also trains the indexer.

        The results of the ``num_shards`` context-parallel ranks add up to the mean over tokens.
        """
        config = self.layer.config
        num_tokens = out.shape[0] * out.shape[1] * num_shards
        loss = loss_of(self.vectors, self._loss, self._grads) / num_tokens
        # With per-token loss, sums over tokens are divided later.
        weight = num_tokens if config.calculate_per_token_loss else 1
        factor = config.dsa_indexer_loss_coeff * weight
        reported = loss / self.layer.tp_group.size()  # whose ranks have the same loss
        return self.layer.aux_losses.attach(out, LOSS_NAME, loss, factor, reported)

    def _probabilities(self, query: Tensor, key: Tensor, mask: Tensor) -> Tensor:
        """Return the attention probabilities over ``mask``, averaged over all heads: [b, q, k]."""
        wide = torch.promote_types(query.dtype, torch.float32)
        query, key = (x.to(wide).permute(1, 2, 0, 3) for x in (query, key))
        scores = torch.matmul(query * self.layer.softmax_scale, key.transpose(-1, -2))
        probabilities = scores.masked_fill_(~mask.unsqueeze(1), -math.inf).softmax(-1)
        total = probabilities.sum(1) / self.layer.config.num_attention_heads
        return reduce_from_tensor_model_parallel_region(total, self.layer.tp_group)


def _lengths(packed: PackedSeqParams | None, num_keys: int, num_shards: int) -> tuple[int, ...]:
    """Return the lengths of the sequences in a row of all ranks; padding is one more sequence."""
    if packed is None or num_shards > 1:
        return row_lengths(None if packed is None else packed.lengths, num_keys * num_shards)
    rest = num_keys - sum(packed.lengths)
    return (*packed.lengths, rest) if rest else packed.lengths


def _split(x: Tensor, shape: torch.Size) -> tuple[Tensor, Tensor]:
    """Split [s, b, 1, ..] into the first values, in ``shape``, and the rest [s, b, ..]."""
    first, rest = x.squeeze(2).split([shape.numel(), x.shape[-1] - shape.numel()], -1)
    return first.unflatten(-1, shape), rest
