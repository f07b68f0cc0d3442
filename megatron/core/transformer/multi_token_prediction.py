"""Multi-token prediction (MTP): layers after the decoder that each predict one further token.

Source: arXiv 2412.19437, section 2.2.  Depth k (from 1) concatenates the hidden state of depth
k - 1 (depth 0 is the decoder) with the embedding of the token k positions ahead, projects both to
h, and applies a transformer layer; the model's output layer then predicts the token k + 1 positions
ahead.  MTP does not change the decoder's logits and loss.  It runs in training, and in generation
where it drafts tokens.

Parameter names, for depth i from 0, are the same in every layout and in Megatron-LM's checkpoints:

    mtp.layers.<i>.enorm.weight               norm of the embedding
    mtp.layers.<i>.hnorm.weight               norm of the hidden state
    mtp.layers.<i>.eh_proj.weight             [h, 2 h], columns of the embedding first
    mtp.layers.<i>.transformer_layer.<rest>   as decoder.layers.<n>.<rest> of the last layer
    mtp.layers.<i>.final_layernorm.weight     before the output layer and the next depth

With LayerNorm each norm has a ``.bias`` too.  The embedding and the output layer are the model's.

``s`` tokens, ``b`` sequences, ``h`` hidden size.  Collective: `tokens_ahead`, over cp.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron.core.aux_loss import AuxLosses, aux_losses_of
from megatron.core.packed_seq_params import AttentionMask
from megatron.core.parallel.context_parallel_partition import (
    held_tokens,
    order_of_gathered,
    sequence_ends,
)
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ReplicatedLinear
from megatron.core.tensor_parallel.mappings import all_gather_first_dim
from megatron.core.tensor_parallel.random import checkpoint
from megatron.core.transformer.low_precision import quantize_layer
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.norms import Norm
from megatron.core.transformer.spec_utils import Slot, build_module
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(frozen=True)
class ShiftedTargets:
    """Token, label and loss mask k positions after each token of this rank: [b, s/cp] each.

    All are 0 where the sequence has ended.
    """

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    num_tokens: Tensor  # sum of the loss mask over all cp ranks


def tokens_ahead(
    rows: tuple[Tensor, Tensor, Tensor], num_depths: int, lengths: tuple[int, ...], cp: ProcessGroup
) -> list[ShiftedTargets]:
    """Return the tokens, labels and loss masks k positions ahead, for k = 1 .. ``num_depths``.

    ``rows``: this rank's tokens, labels and loss mask [b, s/cp].  ``lengths``: lengths of the
    packed sequences in a row; nothing is shifted from one sequence into another.  A token may be k
    positions ahead on another rank.  Collective over cp: one all-gather.
    """
    where = rows[0].device
    own = held_tokens(lengths, cp.rank(), cp.size(), where)
    # float64 represents ids and mask exactly, so that one all-gather sends all three.
    table = torch.stack([row.transpose(0, 1).double() for row in rows], dim=1)
    if cp.size() > 1:
        order, _ = order_of_gathered(lengths, tuple(range(cp.size())), cp.size(), where)
        table = all_gather_first_dim(table, cp)[order]
    ends = sequence_ends(lengths, where).view(-1, 1, 1)
    places = torch.arange(len(table), device=where).view(-1, 1, 1)
    result = []
    for k in range(1, num_depths + 1):
        shifted = table.roll(-k, 0).masked_fill(places + k >= ends, 0)
        tokens, labels, mask = shifted[own].permute(1, 2, 0)
        ids = tokens.long(), labels.long()
        result.append(ShiftedTargets(*ids, mask.to(rows[2].dtype), shifted[:, 2].sum()))
    return result


class MultiTokenPredictionLayer(MegatronModule):
    """The layer of one MTP depth: norms, projection, transformer layer, final norm."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_spec: Slot,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        """Build the layer.  ``layer_spec`` is the spec of the decoder's last layer."""
        super().__init__(config)
        self.tp_group = pg_collection.tp
        hidden, eps = config.hidden_size, config.layernorm_epsilon
        self.enorm = Norm(config, hidden, eps)
        self.hnorm = Norm(config, hidden, eps)
        self.eh_proj = ReplicatedLinear(
            2 * hidden, hidden, config=config, init_method=config.init_method
        )
        self.transformer_layer = build_module(
            layer_spec,
            config=config,
            layer_number=config.num_layers,
            offered={"pg_collection": pg_collection, "tp_group": pg_collection.tp},
        )
        layer = self.transformer_layer
        last = config.num_layers - 1
        quantize_layer(layer, config, last, pg_collection=pg_collection)
        self.final_layernorm = Norm(config, hidden, eps)

    def forward(
        self,
        hidden: Tensor,
        embedded: Tensor,
        attention_mask: AttentionMask | None,
        **shared: object,
    ) -> Tensor:
        """Compute the hidden states of this depth: 2 x [s, b, h] -> [s, b, h].

        ``hidden``: hidden states of the previous depth.  ``embedded``: embeddings of the tokens k
        positions ahead.  ``shared``: keyword arguments of the transformer layer.
        """

        def compute(hidden: Tensor, embedded: Tensor) -> Tensor:
            projected = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1))
            if self.config.fp32_residual_connection:
                projected = projected.float()
            out, _ = self.transformer_layer(projected, attention_mask, **shared)
            normed: Tensor = self.final_layernorm(out)
            return normed

        c = self.config
        recomputes = c.recompute_granularity == "full" and c.recompute_method != "block"
        run = partial(checkpoint, compute, False) if recomputes else compute
        return run(hidden, embedded)


class MultiTokenPrediction(MegatronModule):
    """The layers of all MTP depths, and their losses."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_spec: Slot,
        *,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        super().__init__(config)
        self.num_depths = config.mtp_num_layers or 0
        self.layers = nn.ModuleList(
            MultiTokenPredictionLayer(config, layer_spec, pg_collection)
            for _ in range(self.num_depths)
        )
        for depth, layer in enumerate(self.layers):
            for losses in aux_losses_of([layer]):
                losses.layer_index = config.num_layers + depth
        self.aux_losses = AuxLosses(config.num_layers)

    def attach(self, hidden: Tensor, depth: int, losses: Tensor, ahead: ShiftedTargets) -> Tensor:
        """Return ``hidden`` with the token ``losses`` [b, s/cp] of ``depth`` (from 0) attached.

        The backward pass of the result also runs backward through the losses.  Their mean enters
        the gradient, weighted by --mtp-loss-scaling-factor / number of depths.  With
        --calculate-per-token-loss their sum enters, since gradients are divided by the number of
        tokens later.  The mean is logged as "mtp_<depth + 1> loss".
        """
        total = (losses * ahead.loss_mask).sum()
        reported = torch.stack([total.detach(), ahead.loss_mask.sum().to(total.dtype)])
        if not self.config.calculate_per_token_loss:
            total = total / ahead.num_tokens.to(total.dtype).clamp(min=1)
        factor = self.config.mtp_loss_scaling_factor / self.num_depths
        return self.aux_losses.attach(hidden, f"mtp_{depth + 1} loss", total, factor, reported)
