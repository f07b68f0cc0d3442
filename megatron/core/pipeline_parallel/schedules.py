"""Run one training or evaluation step in the pipeline schedule of the configuration.

`get_forward_backward_func` returns the same function for every layout: one rank without pipeline is
a pipeline of one stage.  The step is a plan (`plan`, `communication_plan`) that an
`Executor` follows.

Order of collectives: those of `executor`; after the last backward pass those of
``hooks.finalize_model_grads_func``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from megatron.core import device
from megatron.core.aux_loss import aux_losses_of
from megatron.core.config.errors import ConfigError
from megatron.core.parallel.default_groups import library_call
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.pipeline_parallel.communication_plan import instructions
from megatron.core.pipeline_parallel.executor import Executor, StepTask
from megatron.core.pipeline_parallel.microbatch import (
    ForwardStepFunc,
    LossRule,
    StepHooks,
    StepLosses,
)
from megatron.core.pipeline_parallel.plan import Instruction, Placement, most_in_flight, schedule_of
from megatron.core.pipeline_parallel.transfer import Mailbox
from megatron.core.utils import get_model_config

T = TypeVar("T")
Shape = tuple[int, int, int]
AdjustShapes = Callable[[list[Shape], list[Shape]], tuple[list[Shape], list[Shape]]]


def get_forward_backward_func() -> Callable[..., StepLosses]:
    """Return the function that runs one step; it reads the schedule from the model's config."""
    return forward_backward


@library_call(unused="p2p_communicator grad_finalize_pgs")
def forward_backward(
    *,
    forward_step_func: ForwardStepFunc,
    data_iterator: object,
    model: nn.Module | Sequence[nn.Module],
    num_microbatches: int,
    seq_length: int,
    micro_batch_size: int,
    decoder_seq_length: int | None = None,
    forward_only: bool = False,
    collect_non_loss_data: bool = False,
    first_val_step: bool | None = None,
    adjust_tensor_shapes_fn: AdjustShapes | None = None,
    config: Any = None,
    pg_collection: ProcessGroupCollection,
    hooks: StepHooks | None = None,
) -> StepLosses:
    """Run all micro-batches of a step through all stages.  Collective over the ranks of the model.

    ``model`` and ``data_iterator`` are one object, or a list with one per model chunk of this rank.
    When it returns, the gradients of the step are complete, unless ``forward_only``.  Returns the
    values that the loss function reported, one per micro-batch, on the ranks that compute the loss,
    and an empty list on the others.  ``adjust_tensor_shapes_fn``: see `messages_of`; by default the
    model's.  ``hooks``: by default those that a project has set in the config.  ``first_val_step``
    has no effect; Megatron-LM's signature has it.
    """
    del first_val_step
    if num_microbatches < 1:
        raise ConfigError(f"num_microbatches={num_microbatches}: a step has at least one")
    groups = pg_collection
    chunks = _listed(model)
    config = get_model_config(chunks[0]) if config is None else config
    hooks = hooks_of(config) if hooks is None else hooks
    rank = groups.pp.rank()
    num_ranks = groups.pp.size()
    placement, plan = plan_of(
        config, num_ranks, len(chunks), num_microbatches, forward_only=forward_only
    )
    num_deferred = 0
    if num_ranks > 1 and config.defer_embedding_wgrad_compute and not forward_only:
        num_deferred = config.wgrad_deferral_limit or num_microbatches
    per_token = config.calculate_per_token_loss
    task = StepTask(
        forward_step_func=forward_step_func,
        rule=LossRule(num_microbatches=num_microbatches, per_token=per_token, cp_group=groups.cp),
        hooks=hooks,
        forward_only=forward_only,
        collect_non_loss_data=collect_non_loss_data,
        num_deferred=num_deferred,
        in_pairs=config.overlap_moe_expert_parallel_comm,
        delays_weights=config.delay_wgrad_compute,
    )
    tokens = seq_length, decoder_seq_length or 0, micro_batch_size
    adjust = adjust_tensor_shapes_fn or shape_adjustment(chunks[0])
    shapes, dtype = messages_of(config, groups, tokens, placement.num_stages, adjust)
    mailbox = Mailbox(
        placement,
        groups.pp,
        hooks,
        shapes=None if config.variable_seq_lengths else shapes,
        dtype=dtype,
        waits_at_once=not config.overlap_p2p_comm,
    )
    executor = Executor(chunks, _listed(data_iterator), placement, rank, task, mailbox)
    if not forward_only:
        for aux_losses in aux_losses_of(chunks):
            aux_losses.begin(task.rule.aux_weight(hooks))
        for i, chunk in enumerate(chunks):
            for graphs in graphs_of(chunk):
                graphs.begin_step(most_in_flight(plan[rank], i))
    losses = executor.run(plan[rank])
    if not per_token:
        losses.num_tokens = None
    elif losses.num_tokens is None:  # only the stage with the loss counts tokens
        losses.num_tokens = torch.zeros((), dtype=torch.float64, device=device.current())
    if hooks.finalize_model_grads_func is not None and not forward_only:
        with hooks.timed("all-grads-sync", log_level=1):
            hooks.finalize_model_grads_func(chunks, losses.num_tokens)
    return losses


def hooks_of(config: Any) -> StepHooks:
    """Return the callables that Megatron Core's configs have."""
    return StepHooks(
        grad_scale_func=config.grad_scale_func,
        finalize_model_grads_func=config.finalize_model_grads_func,
        timers=config.timers,
        barrier_with_level_1_timers=config.barrier_with_L1_time,
    )


def graphs_of(model: nn.Module) -> Iterator[Any]:
    """Yield the CUDA graphs (`cuda_graphs.LayerGraphs`) of each stack of layers in ``model``."""
    for module in model.modules():
        if (graphs := module.__dict__.get("graphs")) is not None:
            yield graphs


def plan_of(
    config: Any,
    num_ranks: int,
    num_chunks: int,
    num_microbatches: int,
    *,
    forward_only: bool = False,
) -> tuple[Placement, list[list[Instruction]]]:
    """Return the placement of ``config``'s stages and each pipeline rank's instructions."""
    in_pairs = config.overlap_moe_expert_parallel_comm and not forward_only
    placement, orders = schedule_of(
        config.pipeline_schedule if num_ranks > 1 else None,
        num_ranks=num_ranks,
        num_chunks=num_chunks,
        num_microbatches=num_microbatches,
        group=config.microbatch_group_size_per_vp_stage if num_chunks > 1 else None,
        forward_only=forward_only,
        in_pairs=in_pairs,
    )
    early = num_ranks > 1 and config.overlap_p2p_comm_warmup_flush
    return placement, instructions(orders, placement, early=early, in_pairs=in_pairs)


# Names that Megatron-LM exports.  The layout, not the caller, decides which schedule runs.
forward_backward_no_pipelining = forward_backward
forward_backward_pipelining_without_interleaving = forward_backward
forward_backward_pipelining_with_interleaving = forward_backward


def shape_adjustment(model: nn.Module | None) -> AdjustShapes | None:
    """Return the method ``adjust_tensor_shapes`` of a model or of a wrapper, None without one."""
    while model is not None and not hasattr(model, "adjust_tensor_shapes"):
        model = model._modules.get("module")
    adjust: AdjustShapes | None = getattr(model, "adjust_tensor_shapes", None)
    return adjust


def messages_of(
    config: Any,
    groups: ProcessGroupCollection,
    tokens: tuple[int, int, int],
    num_stages: int,
    adjust: AdjustShapes | None = None,
) -> tuple[list[Shape], torch.dtype]:
    """Return the shapes and the dtype of the tensors that each stage but the last sends.

    ``tokens``: sequence length, decoder sequence length, sequences in a micro-batch.  Each shape is
    [tokens of one rank, micro-batch size, hidden size].  In an encoder-decoder model the stages of
    the decoder send the encoder's output and the decoder's hidden states, concatenated in this
    order along the sequence.  ``adjust`` maps the shapes that stages receive and those that they
    send to other shapes, for a model that sends more than hidden states.
    """
    seq_length, decoder_seq_length, micro_batch_size = tokens
    cut = groups.cp.size() * (groups.tp.size() if config.sequence_parallel else 1)
    encoder_stages = config.encoder_pipeline_model_parallel_size or num_stages
    shapes = [
        (
            (seq_length + (decoder_seq_length if stage >= encoder_stages else 0)) // cut,
            micro_batch_size,
            config.residual_width,
        )
        for stage in range(num_stages - 1)
    ]
    if adjust is not None and shapes:
        _, shapes = adjust(shapes, shapes)
    in_fp32 = config.fp32_residual_connection
    return shapes, torch.float32 if in_fp32 else config.pipeline_dtype or config.params_dtype


def _listed(value: T | Sequence[T]) -> list[T]:
    """Return ``value`` as a list: one element, unless it is a list or tuple already."""
    return list(value) if isinstance(value, list | tuple) else [value]  # type: ignore[list-item]
