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

A depth of a hybrid model has several layers, by --mtp-hybrid-override-pattern, in place of the
transformer layer: ``mtp.layers.<i>.mtp_model_layer.layers.<j>.<rest>``.  With
--mtp-use-repeated-layer only depth 0 has weights, and the other depths use them.

With LayerNorm each norm has a ``.bias`` too.  The embedding and the output layer are the model's.

``s`` tokens, ``b`` sequences, ``h`` hidden size.  Collective: `tokens_ahead`, over cp.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron.core.aux_loss import AuxLosses, aux_losses_of
from megatron.core.packed_seq_params import AttentionMask, PackedSeqParams
from megatron.core.parallel.context_parallel_partition import (
    held_tokens,
    order_of_gathered,
    row_lengths,
    sequence_ends,
)
from megatron.core.parallel.default_groups import library_call
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import (
    all_gather_first_dim,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.random import checkpoint
from megatron.core.transformer.low_precision import quantize_layer
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.norms import Norm
from megatron.core.transformer.spec_utils import ModuleSpec, Slot, build_module, build_norm
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
    own = held_tokens(lengths, cp.rank(), cp.size(), rows[0].device)
    # float64 represents ids and mask exactly, so that one all-gather sends all three.
    table = torch.stack([row.transpose(0, 1).double() for row in rows], dim=1)
    table = _complete_rows(table, lengths, cp)
    result = []
    for k in range(1, num_depths + 1):
        moved = shifted(table, lengths, k)
        tokens, labels, mask = moved[own].permute(1, 2, 0)
        ids = tokens.long(), labels.long()
        result.append(ShiftedTargets(*ids, mask.to(rows[2].dtype), moved[:, 2].sum()))
    return result


def roll_tensor(
    tensor: Tensor,
    shifts: int = -1,
    dims: int = -1,
    cp_group: ProcessGroup | None = None,
    packed_seq_params: PackedSeqParams | None = None,
) -> tuple[Tensor, Tensor]:
    """Shift this rank's tokens along ``dims`` by -``shifts`` to the start; also return their sum.

    Where a sequence has ended there are zeros.  Collective over ``cp_group``.
    """
    size, rank = (1, 0) if cp_group is None else (cp_group.size(), cp_group.rank())
    table = tensor.movedim(dims, 0).contiguous()
    packed = None if packed_seq_params is None else packed_seq_params.lengths
    lengths = row_lengths(packed, len(table) * size)
    table = table if cp_group is None else _complete_rows(table, lengths, cp_group)
    rolled = shifted(table, lengths, -shifts)[held_tokens(lengths, rank, size, tensor.device)]
    rolled = rolled.movedim(0, dims).contiguous()
    return rolled, rolled.sum()


def _complete_rows(table: Tensor, lengths: tuple[int, ...], cp: ProcessGroup) -> Tensor:
    """Return the tokens of all ranks in order: [s/cp, ..] -> [s, ..].  Collective over cp."""
    size = cp.size()
    if size == 1:
        return table
    order, _ = order_of_gathered(lengths, tuple(range(size)), size, table.device)
    return all_gather_first_dim(table, cp)[order]


def shifted(table: Tensor, lengths: tuple[int, ...], k: int) -> Tensor:
    """Return what is ``k`` positions after each token [s, ..]; 0 where its sequence has ended."""
    is_over = torch.arange(len(table), device=table.device) + k >= sequence_ends(
        lengths, table.device
    )
    return table.roll(-k, 0).masked_fill(is_over.view(-1, *[1] * (table.dim() - 1)), 0)


@dataclass
class MultiTokenPredictionLayerSubmodules:
    """Submodules of the layer of one depth."""

    enorm: Slot | None = None
    hnorm: Slot | None = None
    eh_proj: Slot | None = None
    transformer_layer: Slot | None = None
    layer_norm: Slot | None = None


@dataclass
class MultiTokenPredictionBlockSubmodules:
    """Specs of the layers of all depths."""

    layer_specs: Sequence[Slot] | None = None


class MultiTokenPredictionStack(MegatronModule):
    """The layers of one MTP depth of a hybrid model, which run in sequence."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: Sequence[Slot],
        layer_number: int,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        super().__init__(config)
        # ``layer_number`` counts over the complete model, whatever layers the stage has.
        offered = {"pg_collection": pg_collection, "pp_layer_offset": 0}
        self.layers = nn.ModuleList(
            build_module(each, config=config, layer_number=layer_number, offered=offered)
            for each in submodules
        )

    def forward(
        self,
        hidden: Tensor,
        attention_mask: AttentionMask | None,
        inference_context: Any = None,
        **shared: Any,
    ) -> tuple[Tensor, None]:
        """Return the hidden states [s, b, h] after all layers, as a transformer layer does.

        Layers have one layer number, so that each needs entries of its own in a KV cache.
        """
        cache = inference_context
        for i, layer in enumerate(self.layers):
            if cache is not None and i:
                cache = cache.at_depth(self.config.mtp_num_layers)
            hidden, _ = layer(hidden, attention_mask, inference_context=cache, **shared)
        return hidden, None


class MultiTokenPredictionLayer(MegatronModule):
    """The layer of one MTP depth: norms, projection, transformer layer, final norm."""

    @library_call("config submodules layer_number vp_stage model_comm_pgs")
    def __init__(
        self,
        config: TransformerConfig,
        submodules: MultiTokenPredictionLayerSubmodules,
        layer_number: int = 1,
        vp_stage: int | None = None,
        *,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        """Build the layer of depth ``layer_number``, from 1."""
        super().__init__(config)
        self.submodules = submodules
        self.layer_number = layer_number
        self.vp_stage = vp_stage
        self.tp_group = pg_collection.tp
        self.cp_group = pg_collection.cp
        self.sequence_parallel = config.sequence_parallel
        hidden = config.hidden_size
        groups = {"pg_collection": pg_collection, "tp_group": pg_collection.tp}
        self.enorm = build_norm(submodules.enorm or Norm, config, hidden)
        self.hnorm = build_norm(submodules.hnorm or Norm, config, hidden)
        self.eh_proj = build_module(
            submodules.eh_proj,
            2 * hidden,
            hidden,
            config=config,
            init_method=config.init_method,
            bias=False,
            offered={**groups, "gather_output": False, "skip_bias_add": False, "is_expert": False},
        )
        inner = build_module(
            submodules.transformer_layer,
            config=config,
            layer_number=config.num_layers,
            offered={**groups, "pp_layer_offset": 0},
        )
        is_stack = isinstance(inner, MultiTokenPredictionStack)
        self._inner_name = "mtp_model_layer" if is_stack else "transformer_layer"
        setattr(self, self._inner_name, inner)
        quantize_layer(inner, config, config.num_layers - 1, pg_collection=pg_collection)
        self.final_layernorm = build_norm(submodules.layer_norm or Norm, config, hidden)

    def forward(
        self,
        input_ids: Tensor | None,
        position_ids: Tensor | None,
        hidden_states: Tensor,
        attention_mask: AttentionMask | None,
        *,
        embedding: Callable[..., Tensor] | None = None,
        embedded: Tensor | None = None,
        **shared: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Compute the hidden states of this depth: [s, b, h] -> [s, b, h], and ids and positions.

        ``hidden_states``: those of the previous depth.  ``embedded``: embeddings of the tokens k
        positions ahead; if they are not given, ``embedding`` computes them from ids and positions
        of the previous depth.  ``shared``: keyword arguments of the transformer layer.
        """
        if embedded is None:
            assert input_ids is not None, "neither embeddings nor ids"
            assert position_ids is not None, "ids have positions"
            assert embedding is not None, "neither embeddings nor what computes them"
            input_ids, position_ids, embedded, hidden_states = self._get_embeddings(
                input_ids, position_ids, embedding, hidden_states, shared.get("packed_seq_params")
            )

        def compute(hidden: Tensor, embedded: Tensor) -> Tensor:
            both = torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1)
            projected, _ = self.eh_proj(both)
            if projected.shape[-1] != hidden.shape[-1]:  # a layer that shards its outputs
                projected = gather_from_tensor_model_parallel_region(projected, self.tp_group)
                if self.sequence_parallel:
                    projected = scatter_to_sequence_parallel_region(projected, self.tp_group)
            if self.config.fp32_residual_connection:
                projected = projected.float()
            out, _ = getattr(self, self._inner_name)(projected, attention_mask, **shared)
            normed: Tensor = self.final_layernorm(out)
            return normed

        c = self.config
        recomputes = c.recompute_granularity == "full" and c.recompute_method != "block"
        run = partial(checkpoint, compute, False) if recomputes else compute
        return run(hidden_states, embedded), input_ids, position_ids

    def _get_embeddings(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        embedding: Callable[..., Tensor],
        hidden_states: Tensor,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return ids and positions one token ahead, their embeddings, and the hidden states."""
        input_ids, position_ids = (
            roll_tensor(ids, -1, -1, self.cp_group, packed_seq_params)[0]
            for ids in (input_ids, position_ids)
        )
        embedded = embedding(input_ids=input_ids, position_ids=position_ids)
        return input_ids, position_ids, embedded, hidden_states


class MultiTokenPredictionBlock(MegatronModule):
    """The layers of all MTP depths, and their losses."""

    @library_call("config spec vp_stage model_comm_pgs")
    def __init__(
        self,
        config: TransformerConfig,
        spec: MultiTokenPredictionBlockSubmodules | ModuleSpec,
        vp_stage: int | None = None,
        *,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        super().__init__(config)
        submodules = spec.submodules if isinstance(spec, ModuleSpec) else spec
        specs = submodules.layer_specs or ()
        assert specs, "a block of multi-token prediction has at least one layer"
        self.submodules = submodules
        self.vp_stage = vp_stage
        self.cp_group = pg_collection.cp
        self.num_depths = len(specs)
        self.layers = nn.ModuleList(
            build_module(
                each,
                config=config,
                layer_number=depth,
                offered={"pg_collection": pg_collection, "vp_stage": vp_stage},
            )
            for depth, each in enumerate(specs[: config.num_mtp_modules or None], start=1)
        )
        indices = count(config.num_layers)
        for layer in self.layers:
            stack = getattr(layer, "mtp_model_layer", None)
            for each in [layer] if stack is None else stack.layers:
                index = next(indices)
                for losses in aux_losses_of([each]):
                    losses.layer_index = index
        self.aux_losses = AuxLosses(config.num_layers)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        hidden_states: Tensor,
        attention_mask: AttentionMask | None,
        *,
        extra_block_kwargs: dict[str, Any] | None = None,
        embedding: Callable[..., Tensor],
        **shared: Any,
    ) -> Tensor:
        """Return the hidden states of all depths, the decoder's first: [s, b, h] -> [n s, b, h].

        For models of projects: `GPTModel` runs the layers itself.
        """
        states = [hidden_states]
        shared |= extra_block_kwargs or {}
        for depth in range(self.num_depths):
            state, input_ids, position_ids = self.layer(depth)(
                input_ids,
                position_ids,
                states[-1],
                attention_mask,
                embedding=embedding,
                **shared,
            )
            states.append(state)
        return torch.cat(states)

    def layer(self, depth: int) -> nn.Module:
        """Return the layer of ``depth``, from 0; the last layer repeats."""
        return self.layers[min(depth, len(self.layers) - 1)]

    def attach(self, hidden: Tensor, depth: int, losses: Tensor, ahead: ShiftedTargets) -> Tensor:
        """Return ``hidden`` with the token ``losses`` [b, s/cp] of ``depth`` (from 0) attached.

        They have the weight --mtp-loss-scaling-factor / number of depths.
        """
        factor = self.config.mtp_loss_scaling_factor / self.num_depths
        by_token = self.config.calculate_per_token_loss
        return attach_losses(
            self.aux_losses, hidden, f"mtp_{depth + 1} loss", (losses, ahead), factor, by_token
        )


def attach_losses(
    attached: AuxLosses,
    x: Tensor,
    name: str,
    losses: tuple[Tensor, ShiftedTargets],
    weight: float,
    by_token: bool,
) -> Tensor:
    """Return ``x``, whose backward pass also runs backward through the losses [b, s/cp] of tokens.

    ``losses``: they, and the targets that they have.  Their mean enters the gradient, times
    ``weight``, and is logged as ``name``.  ``by_token`` (--calculate-per-token-loss): their sum
    enters, since gradients are divided by the number of tokens later.
    """
    of_tokens, ahead = losses
    total = (of_tokens * ahead.loss_mask).sum()
    reported = torch.stack([total.detach(), ahead.loss_mask.sum().to(total.dtype)])
    if not by_token:
        total = total / ahead.num_tokens.to(total.dtype).clamp(min=1)
    return attached.attach(x, name, total, weight, reported)
