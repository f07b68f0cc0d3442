"""Log-probabilities of a round under the weights of the model: forward passes of training.

Order of collectives: those of the passes, then one sum over all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core import device
from megatron.post_training.rl.objective import apply_policy
from megatron.post_training.rl.rounds import Round, step_batches
from megatron.post_training.rl.token_scores import score_labels
from megatron.training.data.batch import next_batch
from megatron.training.data.loaders import chunk_iterators
from megatron.training.models.kind import Batch
from megatron.training.runtime.runtime import Runtime
from megatron.training.step.train_step import forward_backward


def round_log_probs(run: Runtime, round_: Round) -> Tensor:
    """Return the log-probabilities [n, s] of all answers, 0 elsewhere.  Collective over all ranks.

    Each data-parallel rank computes its share of the rollouts.
    """
    rollouts = round_.rollouts
    groups = run.groups
    count = len(rollouts.tokens)
    size = run.config.training.micro_batch_size
    rank = groups.dp.rank()
    step = size * groups.dp.size()
    blank = torch.zeros_like(rollouts.sampled_log_probs)
    filled = replace(round_, old_log_probs=blank, reference_log_probs=blank)
    batches = step_batches(run.config, filled, torch.arange(count), rank)
    for chunk in run.model_chunks:
        chunk.eval()
    scored = replace(run, forward_step_func=partial(_score, run))
    found = forward_backward(
        scored,
        chunk_iterators(run, batches, prefetches=False),
        len(batches),
        forward_only=True,
    )
    for chunk in run.model_chunks:
        chunk.train()
    total = torch.zeros(blank.shape, device=device.current())
    if run.has_loss and groups.tp.rank() == 0:
        for i, of_batch in enumerate(found):
            rows = total[i * step + rank * size :][:size]
            rows.scatter_(1, of_batch["positions"], of_batch["log_probs"])
    if groups.world.size() > 1:  # each value is on one rank, the others add zeros
        dist.all_reduce(total, group=groups.world)
    return total.cpu() * rollouts.is_answer


def _score(run: Runtime, data_iterator: Iterator[Any] | None, model: nn.Module) -> tuple[Any, Any]:
    """Run a stage on the next micro-batch, as the forward step of training."""
    batch = next_batch(run, data_iterator, model)
    return apply_policy(model, batch), partial(_reported, run, batch)


def _reported(
    run: Runtime, batch: Batch, logits: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    temperature = run.config.rl.rl_default_temperature
    log_probs = score_labels(
        logits, batch["labels"], run.groups.tp, temperature=temperature
    ).log_probs
    none = log_probs.new_zeros(())
    return none, none + 1, {"log_probs": log_probs, "positions": batch["position_ids"]}
