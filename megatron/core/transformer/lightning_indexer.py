"""Lightning indexer of sparse attention: a score of each key for each query, and its losses.

Source: DeepSeek-V3.2.  The score of key t for query s is sum_h w[s, h] relu(q[s, h] k[t]): a few
narrow heads that share one key.  A query attends to the keys with the largest scores.  Selection
has no gradient: the indexer learns from the divergence between the softmax of its scores and the
attention probabilities, averaged over heads.  Its inputs are detached, so that this loss trains no
other parameter.

``s`` tokens, ``b`` sequences, ``n`` index heads, ``d`` their width, ``q`` queries and ``k`` keys of
a block.  Parameters are replicated over tensor-parallel ranks.

Collectives: with sequence parallelism one all-gather over tp in `LightningIndexer.forward`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core.autograd import Context, Function
from megatron.core.fusions.rope import RotaryTable, apply_rotary
from megatron.core.tensor_parallel.layers import ReplicatedLinear
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.norms import Norm
from megatron.core.transformer.transformer_config import TransformerConfig


class IndexVectors(NamedTuple):
    """What the indexer computes of each token; ``weights`` contain the scale of the scores."""

    query: Tensor  # [s, b, n, d]
    weights: Tensor  # [s, b, n]
    key: Tensor  # [s, b, d]


class LightningIndexer(MegatronModule):
    """Projections of the indexer.  ``query_input``: width of the vectors that queries come from."""

    def __init__(
        self, config: TransformerConfig, query_input: int, *, tp_group: ProcessGroup
    ) -> None:
        super().__init__(config)
        heads, width = config.dsa_indexer_n_heads, config.dsa_indexer_head_dim
        epsilon = config.dsa_indexer_k_norm_epsilon
        self.tp_group = tp_group
        self.width = width
        self.scale = 1 / math.sqrt(heads * width)
        self.is_sequence_sharded = config.sequence_parallel and tp_group.size() > 1

        def linear(inputs: int, outputs: int) -> ReplicatedLinear:
            return ReplicatedLinear(inputs, outputs, config=config, init_method=config.init_method)

        self.linear_wq_b = linear(query_input, heads * width)
        self.linear_wk = linear(config.hidden_size, width)
        self.linear_weights_proj = linear(config.hidden_size, heads)
        eps = config.layernorm_epsilon if epsilon is None else epsilon
        self.k_norm = Norm(config, width, eps, normalization="LayerNorm")

    def forward(
        self, hidden_states: Tensor, query_input: Tensor, rotary: RotaryTable
    ) -> IndexVectors:
        """Project [s/tp or s, b, h] and [s/tp or s, b, query_input] to vectors of all s tokens.

        Collective over tp with sequence parallelism, also in backward.
        """
        hidden_states = hidden_states.detach()
        query, _ = self.linear_wq_b(query_input.detach())
        weights, _ = self.linear_weights_proj(hidden_states)
        parts = query, weights, self.k_norm(self.linear_wk(hidden_states)[0])
        if self.is_sequence_sharded:
            # All ranks compute the same loss of all tokens, so each keeps its slice of gradients.
            gathered = gather_from_sequence_parallel_region(
                torch.cat(parts, -1), tensor_parallel_output_grad=False, group=self.tp_group
            )
            parts = gathered.split([part.shape[-1] for part in parts], -1)
        query, weights, key = parts
        return IndexVectors(
            self._rotated(query.unflatten(-1, (-1, self.width)), rotary),
            weights * self.scale,
            self._rotated(key.unsqueeze(2), rotary).squeeze(2),
        )

    def _rotated(self, x: Tensor, rotary: RotaryTable) -> Tensor:
        config = self.config
        table = rotary._replace(interleaved=config.dsa_indexer_rope_interleaved)
        return apply_rotary(x, table, fused=config.apply_rope_fusion)


def index_scores(
    query: Tensor, weights: Tensor, key: Tensor, *, has_relu: bool = True
) -> tuple[Tensor, Tensor]:
    """Return the scores [b, q, k] of keys [k, b, d], and the products per head [b, q, n, k].

    ``query`` [q, b, n, d] and ``weights`` [q, b, n] are those of `IndexVectors`.  Both results are
    at least float32; the products are those after the relu.  Without gradients.
    """
    with torch.no_grad():
        wide = torch.promote_types(query.dtype, torch.float32)
        rows = query.to(wide).transpose(0, 1).flatten(1, 2)  # [b, q n, d]
        products = torch.bmm(rows, key.to(wide).permute(1, 2, 0))
        products = products.unflatten(1, (len(query), -1))
        if has_relu:
            products.relu_()
        scores = torch.matmul(weights.to(wide).transpose(0, 1).unsqueeze(2), products).squeeze(2)
    return scores, products


def select(scores: Tensor, visible: Tensor | None, topk: int) -> Tensor:
    """Return the mask [b, q, k] of the ``topk`` largest visible scores of each query.

    Of equal scores, those of earlier keys are taken, so that the choice does not depend on the
    number of keys in a block.  A query with fewer visible keys attends to all of them.
    """
    if visible is not None:
        scores = scores.masked_fill(~visible, -math.inf)
    if scores.shape[-1] <= topk:
        return scores > -math.inf
    least = scores.topk(topk, -1, sorted=False).values.amin(-1, keepdim=True)
    above = scores > least
    level = (scores == least) & (scores > -math.inf)
    places = topk - above.sum(-1, keepdim=True)
    return above | (level & (level.cumsum(-1) <= places))


def divergence(scores: Tensor, target: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the sum over queries of KL(target || softmax(scores)), and its gradient [b, q, k].

    Both are distributions over the keys of ``mask`` [b, q, k].
    """
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    logs = scores.log_softmax(-1)
    loss = (torch.special.xlogy(target, target) - target * logs.masked_fill(target == 0, 0.0)).sum()
    return loss, logs.exp() - target


def backward_scores(
    gradient: Tensor,
    vectors: tuple[Tensor, Tensor, Tensor],
    products: Tensor,
    *,
    has_relu: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, weights and key of `index_scores`.

    ``gradient`` [b, q, k] of the scores; ``products`` [b, q, n, k] are those of `index_scores`.
    """
    query, weights, key = (x.to(products.dtype) for x in vectors)
    of_weights = torch.matmul(products, gradient.unsqueeze(-1)).squeeze(-1)  # [b, q, n]
    inner = weights.transpose(0, 1).unsqueeze(-1) * gradient.unsqueeze(2)
    if has_relu:
        inner.masked_fill_(products <= 0, 0.0)
    inner = inner.flatten(1, 2)  # [b, q n, k]
    of_query = torch.bmm(inner, key.transpose(0, 1)).unflatten(1, (len(query), -1))
    of_key = torch.bmm(inner.transpose(1, 2), query.transpose(0, 1).flatten(1, 2))
    return of_query.transpose(0, 1), of_weights.transpose(0, 1), of_key.transpose(0, 1)


class _WithGradients(Function[Tensor]):
    """A loss whose gradients are known already, so that no score is saved for backward."""

    @staticmethod
    def forward(ctx: Context[None], loss: Tensor, *both: Tensor) -> Tensor:
        ctx.save_for_backward(*both[len(both) // 2 :])
        return loss.clone()

    @staticmethod
    def backward(ctx: Context[None], grad: Tensor) -> tuple[Any, ...]:
        grads = ctx.saved_tensors
        return None, *(g * grad.to(g.dtype) for g in grads), *(None,) * len(grads)


def loss_of(vectors: IndexVectors, loss: Tensor, gradients: IndexVectors) -> Tensor:
    """Return ``loss`` as a function of ``vectors`` with these gradients, for autograd."""
    grads = (g.to(x.dtype) for g, x in zip(gradients, vectors, strict=True))
    return _WithGradients.apply(loss, *vectors, *grads)
