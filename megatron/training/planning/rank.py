"""Build any rank of a run, without memory and without the other ranks, and measure its costs.

Model, data-parallel wrapper and optimizer are the real ones.  The real executor sends micro-batches
through each chunk, while allocations and collectives are counted.  Process groups use torch's fake
backend, whose collectives do nothing.
"""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.core import device, rank_local
from megatron.core.diagnostics.timers import Timers
from megatron.core.distributed.data_parallel_base import DataParallelBase
from megatron.core.distributed.distributed_data_parallel_config import (
    is_fully_sharded,
    reshards_after_forward,
)
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.num_microbatches_calculator import NumMicroBatchesCalculator
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.parallel.context_parallel_partition import (
    held_tokens,
    order_of_gathered,
    sequence_ends,
)
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.params.param_info import local_part
from megatron.core.peft.lora import check_targets, names_in, store_base, stored_tensors
from megatron.core.pipeline_parallel.executor import Executor, StepTask
from megatron.core.pipeline_parallel.microbatch import LossRule, StepHooks
from megatron.core.pipeline_parallel.plan import PassKind, Transfer, Work
from megatron.core.pipeline_parallel.schedules import messages_of, shape_adjustment
from megatron.core.pipeline_parallel.transfer import Mailbox
from megatron.core.tensor_parallel.frozen_weight import StoredFormat
from megatron.core.tensor_parallel.random import model_parallel_seed
from megatron.core.transformer.attention_masks import band
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.module import frozen_models
from megatron.core.transformer.moe.routing import RoutingResult
from megatron.core.transformer.moe.token_dispatcher import TokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.config.run import RunConfig
from megatron.training.data.batch import next_batch
from megatron.training.models import registry
from megatron.training.planning.costs import PassCost, RankCost, State
from megatron.training.planning.tracing import (
    KnownShapes,
    Tracker,
    attention_without_memory,
    storage_bytes,
)
from megatron.training.runtime.context import RunContext
from megatron.training.runtime.setup import build_model_chunks, create_groups
from megatron.training.tokenizer import TokenizerSpec, create_tokenizer


def cost_of_rank(
    config: RunConfig, rank: int, padded_vocab_size: int, shapes: KnownShapes | None = None
) -> RankCost:
    """Build ``rank`` of the run and return its costs.

    Needs no other process, and restores the state of this one.  The ``shapes`` of other ranks make
    it faster.
    """
    before, random_state = rank_local.take(), torch.get_rng_state()
    rank_local.put({})
    try:
        # A device without memory: meta, or with FSDP2, which refuses meta, fake tensors.
        is_fake = is_fully_sharded(config.ddp)
        with (
            device.simulate_device(config.distributed.device, without_memory=not is_fake),
            _own_tables(),
            FakeTensorMode() if is_fake else contextlib.nullcontext(),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            dist.init_process_group(
                "cpu:fake,meta:fake", store=FakeStore(), rank=rank, world_size=config.world_size
            )
            # Else torch warns when the group is destroyed.
            world = dist.distributed_c10d._get_default_group()
            world._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
            # Tensors without memory take no initial values; DeepEP, and GEMMs that overlap with
            # collectives, cannot run on them.
            model = config.model.changed(
                perform_initialization=False,
                moe_enable_deepep=False,
                tp_comm_overlap=False,
            )
            return _cost(_build(replace(config, model=model), padded_vocab_size), shapes)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        rank_local.put(before)
        torch.set_rng_state(random_state)


def _run_without_values(config: TransformerConfig, model: nn.Module) -> None:
    """Choose kernels and lengths by shapes alone; give each expert equally many rows."""
    factor = config.moe_expert_capacity_factor
    share = 1.0 if factor is None else min(1.0, factor)

    def count_rows(
        num_experts: int, routing: RoutingResult, group: dist.ProcessGroup | None
    ) -> list[list[int]]:
        rows = -int(-routing.experts.numel() * share // num_experts)
        return [[rows] * routing.num_experts] * (group.size() if group else 1)

    for module in model.modules():
        if isinstance(module, DotProductAttention):
            module.sdpa = attention_without_memory
        if hasattr(module, "reads_values"):
            vars(module)["reads_values"] = False
        dispatcher = vars(module).get("token_dispatcher")
        if isinstance(dispatcher, TokenDispatcher):
            dispatcher.count_rows = partial(count_rows, dispatcher.num_experts)


@contextlib.contextmanager
def _own_tables() -> Iterator[None]:
    """Clear cached tables before and after: their memory belongs to the planned rank."""
    tables = (band, held_tokens, order_of_gathered, sequence_ends)
    for table in tables:
        table.cache_clear()
    try:
        yield
    finally:
        for table in tables:
            table.cache_clear()


_LossFunction = Callable[[Tensor | Sequence[Tensor]], tuple[Tensor, Tensor, dict[str, Tensor]]]


class _Neighbours(Mailbox):
    """Mailbox in place of the other pipeline stages: it receives empty tensors."""

    handed_on: Tensor | None = None
    received = 0  # bytes

    def put(self, transfer: Transfer, tensor: Tensor) -> None:
        self.handed_on = tensor.detach()

    def take(self, transfer: Transfer) -> Tensor:
        message = torch.empty(self._shape(transfer), dtype=self.dtype, device=device.current())
        self.received += storage_bytes([message])
        return message


@dataclass(kw_only=True)
class _PlannedRank(RunContext):
    """A rank whose model and optimizer have no memory."""

    model_chunks: list[nn.Module]
    optimizer: MegatronOptimizer


def _build(config: RunConfig, padded_vocab_size: int) -> _PlannedRank:
    """Build the model chunks and the optimizer of this rank."""
    groups = create_groups(config, only_mine=True)
    for name in _OF_TOKENS:  # separate groups, so that their collectives are counted apart
        ranks = dist.get_process_group_ranks(getattr(groups, name))
        if len(ranks) > 1:
            vars(groups)[name] = dist.new_group(ranks, group_desc=f"of {name}")
    cp_rank = groups.cp.rank() if groups.cp.size() > 1 else None
    model_parallel_seed(config.training.seed, tp_rank=groups.tp.rank(), cp_rank=cp_rank)
    no_text = TokenizerSpec(tokenizer_type="NullTokenizer", vocab_size=padded_vocab_size)
    context = RunContext(
        config=config,
        groups=groups,
        timers=Timers(0, "minmax"),
        batches=NumMicroBatchesCalculator.from_config(config.training, config.data_parallel_size),
        started_at_s=time.time(),
        tokenizer=create_tokenizer(no_text),
        padded_vocab_size=padded_vocab_size,
    )
    sizes = {"vocab_size": padded_vocab_size, "padded_vocab_size": padded_vocab_size}
    chunks = build_model_chunks(
        context, partial(registry.build_model_stage, config, groups=groups, **sizes)
    )
    if config.adapters.lora is not None and config.model.pipeline_model_parallel_size == 1:
        targets = config.adapters.lora.targets
        check_targets(targets, [names_in(chunk, targets) for chunk in chunks])
    if (format := config.adapters.lora_base_dtype) is not None:
        store_base(chunks, cast(StoredFormat, format))
    for model in (*chunks, *frozen_models(chunks)):
        _run_without_values(config.model, model)
    for chunk in chunks:
        for root in getattr(chunk, "units", ())[-1:]:
            # The first pass would do it: the optimizer must see the shards that FSDP2 pads then.
            root._get_fsdp_state()._lazy_init()
    optimizer = get_megatron_optimizer(config.optimizer, chunks, pg_collection=groups)
    for _ in optimizer.named_state():
        pass  # iterating allocates the state
    return _PlannedRank(**vars(context), model_chunks=chunks, optimizer=optimizer)


def _cost(run: _PlannedRank, shapes: KnownShapes | None) -> RankCost:
    """Measure every pass, then the optimizer step."""
    tracker = Tracker(
        [
            *_parameters(run),
            *_frozen(run),
            *_buffers(run),
            *run.optimizer.state_tensors(on_host=False),
        ],
        share_of_true=run.config.data.mask_prob,  # of BERT's tokens: those with a label
        shapes=shapes,
    )
    data, num_stages = run.config.data, run.placement.num_stages
    seq_length, num_rows = registry.shape_of_microbatch(run.config)
    tokens = seq_length, data.decoder_seq_length or 0, num_rows
    messages, dtype = messages_of(
        run.config.model, run.groups, tokens, num_stages, shape_adjustment(run.model_chunks[0])
    )
    with tracker:
        passes = {}
        for number in range(len(run.model_chunks)):
            neighbours = _Neighbours(
                run.placement, run.groups.pp, StepHooks(), shapes=messages, dtype=dtype
            )
            for kind, cost in _passes(run, tracker, neighbours, number).items():
                passes[kind, number] = cost
        alive = tracker.alive
        for chunk in run.model_chunks:  # weights that FSDP2 keeps gathered hide the shards
            for unit in getattr(chunk, "units", ()):
                unit.reshard()
        own = [p.grad for p in _parameters(run) if p.grad is not None]
        gradients = storage_bytes(own) + storage_bytes(_buffers(run))
        lasting = alive - storage_bytes(own)
        del own
        step = tracker.measure(partial(_finish_step, run))
    return RankCost(
        state=State(
            parameters=storage_bytes([*_parameters(run), *_frozen(run)]),
            gradients=gradients,
            optimizer=storage_bytes(
                [*_parameters(run), *run.optimizer.state_tensors(on_host=False)]
            )
            - storage_bytes(_parameters(run)),
            host=storage_bytes(run.optimizer.state_tensors(on_host=True)),
        ),
        num_parameters=sum(local_part(p).numel() for p in _parameters(run)),
        passes=passes,
        message=max(map(prod, messages), default=0) * dtype.itemsize,
        lasting=lasting,
        step_peak=step.peak,
        step_sent=step.sent,
        axes=axes_of(run.groups),
    )


def _passes(
    run: _PlannedRank, tracker: Tracker, neighbours: _Neighbours, chunk: int
) -> dict[PassKind, PassCost]:
    """Return the costs of the passes of one micro-batch through ``chunk``.

    One micro-batch precedes it, so that tables and gradients exist, and it is not the last of the
    step.
    """
    model = run.config.model
    has_weight = model.pipeline_schedule is not None and model.pipeline_schedule[:2] == "zb"
    kinds: list[PassKind] = ["forward", "backward"]
    kinds += ["weight"] if has_weight else []
    is_deferred = model.defer_embedding_wgrad_compute and run.groups.pp.size() > 1
    executor = Executor(
        run.model_chunks,
        [_micro_batches(run.config, run.placement.num_stages)] * len(run.model_chunks),
        run.placement,
        run.groups.pp.rank(),
        StepTask(
            forward_step_func=partial(_forward_step, run),
            rule=LossRule(
                num_microbatches=3,
                per_token=model.calculate_per_token_loss,
                cp_group=run.groups.cp,
            ),
            hooks=StepHooks(grad_scale_func=run.optimizer.scale_loss),
            num_deferred=3 if is_deferred else 0,
        ),
        neighbours,
    )
    executor.begin([Work(kind, i, chunk) for i in range(3) for kind in kinds])

    def cost_of(kind: PassKind, microbatch: int) -> PassCost:
        neighbours.received = 0
        measured = tracker.measure(partial(executor.do, Work(kind, microbatch, chunk)))
        with_result = tracker.alive
        neighbours.handed_on = None
        handed_on = with_result - tracker.alive
        message = neighbours.received
        return PassCost(
            peak=measured.peak - message,
            kept=measured.kept - handed_on - message,
            handed_on=handed_on,
            sent=measured.sent,
        )

    for kind in kinds:
        cost_of(kind, 0)
    forward = cost_of("forward", 1)
    gathered = 0  # bytes of weights that forward leaves gathered for backward, which frees them
    if is_fully_sharded(run.config.ddp) and reshards_after_forward(run.config.ddp):
        params = run.model_chunks[chunk].parameters()
        gathered = storage_bytes(p for p in params if local_part(p) is p)
    later = {kind: cost_of(kind, 1) for kind in kinds[1:]}
    backward = later["backward"]
    later["backward"] = replace(backward, kept=backward.kept + gathered, gathered=gathered)
    return {"forward": replace(forward, kept=forward.kept - gathered, gathered=gathered), **later}


def _forward_step(
    run: _PlannedRank, data: Iterator[dict[str, Tensor]], model: nn.Module
) -> tuple[Any, _LossFunction]:
    batch = next_batch(run, data, model)
    output = registry.implementation_of(run.config).apply(model, batch)
    parts = [output] if isinstance(output, Tensor) else [x for x in output if x is not None]
    return parts[0] if len(parts) == 1 else parts, _loss  # hidden states are a single tensor


def _loss(output: Tensor | Sequence[Tensor]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return a loss over the last stage's output that takes the memory of a real one."""
    parts = [output] if isinstance(output, Tensor) else output
    losses = [part.reshape(-1).float() for part in parts]
    masks = [torch.ones_like(part) for part in losses]
    total = torch.stack([torch.sum(x * mask) for x, mask in zip(losses, masks, strict=True)]).sum()
    return total, masks[0].sum().to(torch.int), {}


def _micro_batches(config: RunConfig, num_stages: int) -> Iterator[dict[str, Any]]:
    """Yield endless micro-batches with all tensors that any stage reads."""
    table = registry.implementation_of(config).batch
    needed = {
        name: expected
        for stage in range(num_stages)
        for name, expected in table(config, stage, num_stages).items()
        if expected is not None
    }
    while True:
        yield {name: expected.largest(device.current()) for name, expected in needed.items()}


def _finish_step(run: _PlannedRank) -> None:
    """Run everything between the last backward pass and the next forward pass."""
    tokens = None
    if run.config.model.calculate_per_token_loss:
        tokens = torch.ones((), dtype=torch.float64, device=device.current())
    chunks = [chunk for chunk in run.model_chunks if isinstance(chunk, DataParallelBase)]
    finalize_model_grads(chunks, tokens)
    run.optimizer.step()
    for chunk in chunks:
        chunk.finish_param_sync(values=False)


def _parameters(run: _PlannedRank) -> Iterator[Tensor]:
    for chunk in run.model_chunks:
        yield from chunk.parameters()


def _frozen(run: _PlannedRank) -> Iterator[Tensor]:
    """Yield the weights of models that are not trained, and those that are stored in few bits."""
    for chunk in run.model_chunks:
        yield from stored_tensors(chunk)
    for model in frozen_models(run.model_chunks):
        yield from model.parameters()


def _buffers(run: _PlannedRank) -> list[Tensor]:
    """Return the gradient buffers."""
    return [
        buffer.grad_data
        for chunk in run.model_chunks
        for buffer in getattr(chunk, "grad_buffers", {}).values()
    ]


_OF_TOKENS = ("ep", "expt_tp", "tp_ep")  # groups of token dispatch
_AXES = {
    "tp": "tp",
    "cp": "cp",
    "cp_inner": "cp",
    "cp_outer": "cp",
    "pp": "pp",
    "embd": "embedding",
    "dp": "dp",
    "dp_cp": "dp",
    "intra_dp_cp": "dp",
    "inter_dist_opt": "dp",
    "expt_dp": "dp",
    "intra_expt_dp": "dp",
    **dict.fromkeys(_OF_TOKENS, "ep"),
}


def axes_of(groups: ProcessGroupCollection) -> dict[str, str]:
    """Return the axis of each process group, by the name of the group.

    Other groups only reduce norms or counts.
    """
    names = reversed(_AXES)  # of several names of one group the first counts
    return {getattr(groups, name).group_name: _AXES[name] for name in names}
