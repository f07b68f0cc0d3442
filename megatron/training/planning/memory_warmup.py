"""Reach the peak memory of a run before its first step, so that it cannot fail hours later.

Without this, memory grows later: the first update allocates the optimizer state, which the second
step holds together with its activations; a batch-size ramp-up raises the number of micro-batches in
flight; the first evaluation needs its own.  Weights, random states, the order of the data and the
counters of layers do not change.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import torch

from megatron.core import device
from megatron.core.aux_loss import aux_losses_of
from megatron.core.distributed.finalize_model_grads import reduce_model_grads
from megatron.core.pipeline_parallel.microbatch import StepHooks
from megatron.training.checkpointing.checkpoint_tensors import rng_state, set_rng_state
from megatron.training.data.loaders import ReadAhead
from megatron.training.process.exit_report import in_phase
from megatron.training.process.rank_print import print_rank_0, ranks_here
from megatron.training.step.run import TrainingRun
from megatron.training.step.train_step import forward_backward

_GIB = 2**30
_ROUNDS = 4  # of micro-batches through a pipeline; more do not raise the peak


@in_phase("allocating the optimizer state")
def make_optimizer_state(run: TrainingRun) -> None:
    """Allocate the optimizer state as zeros, so that memory reports include it.

    Otherwise the first update would allocate it.
    """
    for _ in run.optimizer.named_state():
        pass


@in_phase("rehearsal")
def rehearse(run: TrainingRun) -> None:
    """Run the micro-batches of the largest step and of an evaluation, without an update.

    Collective over all ranks, like a step.
    """
    model = run.config.model
    stages = model.pipeline_model_parallel_size
    # As many micro-batches as the pipeline needs to reach its peak memory.
    needed = _ROUNDS * max(stages, model.microbatch_group_size_per_vp_stage or 1)
    count = min(run.batches.num_microbatches_at_full_size(), needed)
    random_state = rng_state()
    buffers = [(b, b.clone()) for chunk in run.model_chunks for _, b in chunk.named_buffers()]
    run.data.train, data = _first_microbatch_again(run.data.train)
    for chunk in run.model_chunks:
        chunk.zero_grad_buffer()
    run.optimizer.zero_grad()
    hooks = StepHooks(
        grad_scale_func=run.optimizer.scale_loss,
        # Not finalize_model_grads: layers that scale by earlier steps would count this one.
        finalize_model_grads_func=partial(reduce_model_grads, groups=run.groups),
    )
    forward_backward(run, data, count, forward_only=False, hooks=hooks)
    if run.data.valid_loaders:
        for chunk in run.model_chunks:
            chunk.eval()
        with torch.no_grad():
            forward_backward(run, data, count, forward_only=True, hooks=StepHooks())
        for chunk in run.model_chunks:
            chunk.train()
    run.optimizer.zero_grad()
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)
    for losses in aux_losses_of(run.model_chunks):
        losses.take()
    set_rng_state(random_state)
    most, of = device.memory_stats()["max_allocated"], device.total_memory(ranks_here())
    print_rank_0(
        f"rehearsed {count} micro-batches: at most {most / _GIB:.3f} GiB of {of / _GIB:.3f}"
    )


def _first_microbatch_again(data: Any) -> tuple[object, object]:
    """Return data that continues as ``data`` would, and data that repeats a micro-batch.

    The repeated micro-batch is the first one of ``data``.
    """
    if isinstance(data, list):
        pairs = [_first_microbatch_again(one) for one in data]
        return [going for going, _ in pairs], [again for _, again in pairs]
    if data is None:
        return None, None
    if isinstance(data, ReadAhead):
        return data, itertools.repeat(data.first())
    first = next(data)
    return itertools.chain([first], data), itertools.repeat(first)
