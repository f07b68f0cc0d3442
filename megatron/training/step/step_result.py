"""The result of an optimizer step: losses, gradient norm, learning rate, and what is logged."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core import device
from megatron.core.aux_loss import aux_losses_of
from megatron.core.optimizer.clip_grads import calc_params_l2_norm
from megatron.core.transformer.config.attention import SPARSE_VARIANT
from megatron.core.transformer.layer_layout import has_experts, indexer_of_layer
from megatron.core.transformer.moe.router import balance_terms, loss_name
from megatron.core.transformer.sparse_attention import LOSS_NAME
from megatron.training.checkpointing.checkpoint_tensors import RunParts
from megatron.training.estimates.flops import tokens_of_a_sample
from megatron.training.runtime.context import StepResult
from megatron.training.step.run import TrainingRun
from megatron.training.step.weight_hash import check_replicas, params_hash

# Result of `MegatronOptimizer.step`: whether updated, gradient norm, number of zeros.
Update = tuple[bool, float | None, int | None]
Taken = list[tuple[int, str, Tensor]]  # layer index, name, sum over micro-batches


class GlobalBatch(NamedTuple):
    """Sizes of a global batch."""

    size: int  # samples
    num_microbatches: int
    num_untrained: int  # samples that the step leaves out
    is_skipped: bool  # by --iterations-to-skip


def complete_result(
    run: TrainingRun, batch: GlobalBatch, reported: list[dict[str, Tensor]], update: Update
) -> StepResult:
    """Return the result of the step.  Collective over all ranks."""
    config = run.config
    iteration = run.state.iteration + 1
    is_updated, grad_norm, num_zeros = update
    if config.training.empty_unused_memory_level >= 2:
        device.empty_cache()
    experts, layer_losses, ahead = added_losses(run, batch.num_microbatches)
    losses: dict[str, Tensor] = {}
    if run.has_loss:
        group = run.groups.dp_cp
        losses = reduce_losses(reported, group) | experts | reduce_losses([ahead], group)
    else:
        layer_losses = {}
    parts = RunParts(model_chunks=run.model_chunks, groups=run.groups)
    interval = config.training.check_weight_hash_across_dp_replicas_interval
    if interval is not None and iteration % interval == 0:
        check_replicas(parts, iteration)
    logs_norm = config.logging.log_params_norm
    interval = config.logging.log_params_hash_interval
    logs_hash = interval is not None and iteration % interval == 0
    learning_rate, decoupled_learning_rate = run.scheduler.current_learning_rates()
    return StepResult(
        losses=losses,
        grad_norm=grad_norm,
        num_zeros=num_zeros,
        # Computed at every step for TensorBoard; the log line shows the value of its last step.
        params_norm=calc_params_l2_norm(run.model_chunks, run.groups) if logs_norm else None,
        learning_rate=learning_rate,
        decoupled_learning_rate=decoupled_learning_rate,
        loss_scale=float(run.optimizer.get_loss_scale()),
        skipped=not is_updated,
        nan=not is_updated and not all(torch.isfinite(loss).all() for loss in losses.values()),
        batch_size=batch.size,
        num_tokens=batch.size * tokens_of_a_sample(run.config_of_work),
        num_untrained=batch.num_untrained,
        params_hash=params_hash(parts) if logs_hash else None,
        layer_losses=layer_losses,
    )


def reduce_losses(
    reported: Iterable[dict[str, Tensor]], group: dist.ProcessGroup
) -> dict[str, Tensor]:
    """Return one value per loss key from what each micro-batch reported.

    A pair [sum, count] becomes the total sum divided by the total count, over micro-batches and
    ``group``; a single value is averaged over this rank's micro-batches only.  Collective over
    ``group``.
    """
    totals = sum_losses(reported)
    return {key: _finish(total, group) for key, total in totals.items()}


def sum_losses(reported: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return for each key [sum, count] over micro-batches; for single values [sum, count, 0].

    The shape distinguishes the two cases, because reading a value would synchronize with the
    device.
    """
    totals: dict[str, Tensor] = {}
    for losses in reported:
        for key, value in losses.items():
            flat = value.detach().reshape(-1).to(torch.float32)
            if flat.numel() == 1:
                flat = torch.cat([flat, flat.new_ones(1), flat.new_zeros(1)])
            totals[key] = totals[key] + flat if key in totals else flat
    return totals


def _finish(total: Tensor, group: dist.ProcessGroup) -> Tensor:
    if total.numel() == 2 and group.size() > 1:
        total = total.clone()
        dist.all_reduce(total, group=group)
    return total[0] / total[1].clamp(min=1)


def added_losses(
    run: TrainingRun, num_microbatches: int
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Return the auxiliary losses of a step by name.  Collective over all ranks.

    Three dictionaries: the losses of routers and indexers averaged over layers; those of single
    layers, with --moe-per-layer-logging; the losses of multi-token prediction and draft heads, as
    this rank's [sum, count].
    """
    taken = [
        (losses.layer_index, name, value)
        for losses in aux_losses_of(run.model_chunks)
        for name, value in losses.take().items()
    ]
    ahead = {name: value for _, name, value in taken if name.endswith(" loss")}
    return *_losses_of_layers(run, taken, num_microbatches), ahead


def _losses_of_layers(
    run: TrainingRun, taken: Taken, num_microbatches: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the mean of each loss over micro-batches, data-parallel ranks and layers.

    The second dictionary contains, with --moe-per-layer-logging, the loss of each layer under its
    TensorBoard tag, ``moe/NAME_layer_I``.  Both are empty for a model without such losses.
    Collective over all ranks.
    """
    model = run.config.model
    num_layers = model.num_layers + model.num_layers_ahead
    layers_with: dict[str, list[int]] = {}
    if model.num_moe_experts is not None:
        names = [loss_name(kind) for kind, _ in balance_terms(model)]
        names += ["z_loss"] if model.moe_z_loss_coeff is not None else []
        experts = [i for i in range(num_layers) if has_experts(model, i)]
        layers_with = dict.fromkeys(names, experts) if experts else {}
    if model.experimental_attention_variant == SPARSE_VARIANT and model.dsa_indexer_loss_coeff:
        own = [i for i in range(num_layers) if indexer_of_layer(model, i) == i]
        layers_with[LOSS_NAME] = own
    if not layers_with:
        return {}, {}
    names = [*layers_with]
    table = torch.zeros(len(names), num_layers, device=device.current())
    for layer_index, name, value in taken:
        if name in names:
            table[names.index(name), layer_index] += value
    if run.groups.world.size() > 1:
        # Ranks that share a micro-batch hold summands, data-parallel ranks complete values.
        dist.all_reduce(table, group=run.groups.world)
    table /= num_microbatches * run.groups.dp.size()
    rows = dict(zip(names, table, strict=True))
    means = {name: row[layers_with[name]].mean() for name, row in rows.items()}
    if not run.config.logging.moe_per_layer_logging:
        return means, {}
    return means, {
        f"moe/{name}_layer_{i}": row[i] for name, row in rows.items() for i in layers_with[name]
    }
