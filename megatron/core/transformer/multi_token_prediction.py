"""Multi-token prediction: layers behind the decoder that predict tokens further ahead.

Source: arXiv 2412.19437, section 2.2.  At depth k, from 1, a token's hidden state of depth k - 1
(the decoder's own is depth 0) and the embedding of the token k places ahead become one through a
projection and a transformer layer; the model's output layer then predicts the token after that
one.  Only training knows of it: the decoder's logits and its loss stay what they are.

Parameters, for depth i from 0, in every layout and in the names of Megatron-LM's checkpoints:

    mtp.layers.<i>.enorm.weight               norm of the embedding
    mtp.layers.<i>.hnorm.weight               norm of the hidden state
    mtp.layers.<i>.eh_proj.weight             [h, 2 h], columns of the embedding first
    mtp.layers.<i>.transformer_layer.<rest>   as decoder.layers.<n>.<rest> of the last layer
    mtp.layers.<i>.final_layernorm.weight     before the output layer and the next depth

(and ``.bias`` beside each norm's weight under LayerNorm); the embedding and the output layer are
the model's.

``s`` tokens, ``b`` sequences, ``h`` width.  Collective: `tokens_ahead`, over cp.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron.core.aux_loss import AuxLosses, aux_losses_of
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
class Ahead:
    """What stands k places after each token of this rank: [b, s/cp].

    Where its sequence ends before, the ids are 0 and the mask is too.
    """

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    num_tokens: Tensor  # that carry loss, over the ranks of cp


def tokens_ahead(
    rows: tuple[Tensor, Tensor, Tensor], num_depths: int, lengths: tuple[int, ...], cp: ProcessGroup
) -> list[Ahead]:
    """For k from 1 to ``num_depths``; ``rows``: this rank's tokens, labels and loss mask.

    ``lengths`` are those of the sequences in a row, which never see into each other.  The token k
    places ahead may lie on another rank.  Collective over cp: one all-gather.
    """
    where = rows[0].device
    own = held_tokens(lengths, cp.rank(), cp.size(), where)
    # In float64 ids and mask are exact side by side.
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
        result.append(
            Ahead(
                tokens=tokens.long(),
                labels=labels.long(),
                loss_mask=mask.to(rows[2].dtype),
                num_tokens=shifted[:, 2].sum(),
            )
        )
    return result


class MultiTokenPredictionLayer(MegatronModule):
    """One depth."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_spec: Slot,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        """``layer_spec`` is that of the decoder's last layer, whose place this one takes."""
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
        place = config.num_layers - 1
        quantize_layer(self.transformer_layer, config, place, pg_collection=pg_collection)
        self.final_layernorm = Norm(config, hidden, eps)

    def forward(
        self, hidden: Tensor, embedded: Tensor, attention_mask: Tensor | None, **shared: object
    ) -> Tensor:
        """Hidden states of the depth before, embeddings of the tokens ahead: [s, b, h] all."""

        def compute(hidden: Tensor, embedded: Tensor) -> Tensor:
            joined = torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1)
            projected = self.eh_proj(joined)
            if self.config.fp32_residual_connection:
                projected = projected.float()
            out, _ = self.transformer_layer(projected, attention_mask, **shared)
            normed: Tensor = self.final_layernorm(out)
            return normed

        config = self.config
        if config.recompute_granularity == "full" and config.recompute_method != "block":
            return checkpoint(compute, False, hidden, embedded)
        return compute(hidden, embedded)


class MultiTokenPrediction(MegatronModule):
    """All depths, and what their losses add to that of the model."""

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

    def attach(self, hidden: Tensor, depth: int, losses: Tensor, ahead: Ahead) -> Tensor:
        """``hidden``, whose backward pass also goes through the token ``losses`` [b, s/cp].

        ``depth`` counts from 0.  Their mean enters the gradient; with a loss per token their sum,
        which is divided by the tokens of the model's own loss.  Their mean over all is logged.
        """
        total = (losses * ahead.loss_mask).sum()
        reported = torch.stack([total.detach(), ahead.loss_mask.sum().to(total.dtype)])
        if not self.config.calculate_per_token_loss:
            total = total / ahead.num_tokens.to(total.dtype).clamp(min=1)
        factor = self.config.mtp_loss_scaling_factor / self.num_depths
        return self.aux_losses.attach(hidden, f"mtp_{depth + 1} loss", total, factor, reported)
