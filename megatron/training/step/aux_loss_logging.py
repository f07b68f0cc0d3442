"""Auxiliary losses of a step, for the log: of expert layers and of multi-token prediction."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core import device
from megatron.core.aux_loss import aux_losses_of
from megatron.core.transformer.layer_layout import has_experts
from megatron.core.transformer.moe.router import balance_terms, loss_name
from megatron.training.runtime.runtime import Runtime

Taken = list[tuple[int, str, Tensor]]  # layer index, name, sum over micro-batches


def added_losses(
    run: Runtime, num_microbatches: int
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Return the auxiliary losses of a step by name.  Collective over all ranks.

    Three dictionaries: the losses of expert layers averaged over layers; those of single layers,
    with --moe-per-layer-logging; the losses of multi-token prediction, as this rank's [sum, count].
    """
    taken = [
        (losses.layer_index, name, value)
        for losses in aux_losses_of(run.model_chunks)
        for name, value in losses.take().items()
    ]
    ahead = {name: value for _, name, value in taken if name.startswith("mtp_")}
    return *_expert_losses(run, taken, num_microbatches), ahead


def _expert_losses(
    run: Runtime, taken: Taken, num_microbatches: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the mean of each loss over micro-batches, data-parallel ranks and layers.

    The second dictionary contains, with --moe-per-layer-logging, the loss of each layer under its
    TensorBoard tag, ``moe/NAME_layer_I``.  Both are empty for a dense model.  Collective over all
    ranks.
    """
    model = run.config.model
    if model.num_moe_experts is None:
        return {}, {}
    names = [loss_name(kind) for kind, _ in balance_terms(model)]
    names += ["z_loss"] if model.moe_z_loss_coeff is not None else []
    num_layers = model.num_layers + (model.mtp_num_layers or 0)
    layers = [i for i in range(num_layers) if has_experts(model, i)]
    if not names or not layers:
        return {}, {}
    table = torch.zeros(len(names), num_layers, device=device.current())
    for layer_index, name, value in taken:
        if name in names:
            table[names.index(name), layer_index] += value
    if run.groups.world.size() > 1:
        # Ranks that share a micro-batch hold summands, data-parallel ranks complete values.
        dist.all_reduce(table, group=run.groups.world)
    table /= num_microbatches * run.groups.dp.size()
    rows = dict(zip(names, table, strict=True))
    means = {name: row[layers].mean() for name, row in rows.items()}
    if not run.config.logging.moe_per_layer_logging:
        return means, {}
    return means, {f"moe/{name}_layer_{i}": row[i] for name, row in rows.items() for i in layers}
