"""The plan of a run: costs of each rank in one pipeline group, and their lines of text."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

from megatron.core.pipeline_parallel.communication_plan import Pass, inputs
from megatron.core.pipeline_parallel.plan import Instruction, Placement, Work
from megatron.core.pipeline_parallel.schedules import plan_of
from megatron.core.progress import Progress
from megatron.core.transformer.heterogeneous.heterogeneous_config import layer_shapes
from megatron.training.config.distillation import DistillationConfig
from megatron.training.config.run import RunConfig
from megatron.training.estimates.automatic_settings import (
    chunk_line,
    resolve_loss_chunks,
    resolve_pipeline_split,
)
from megatron.training.estimates.parameters import known_padded_vocab_size
from megatron.training.models.registry import layers_of, layers_of_stages
from megatron.training.planning.costs import AXES, RankCost, Volume, activation_peak, volumes
from megatron.training.planning.rank import cost_of_rank
from megatron.training.planning.tracing import KnownShapes, without_compiler
from megatron.training.runtime.setup import grids_of

_GIB = 2**30
# Rounds of micro-batches through the pipeline that are simulated: further ones are alike.
_ROUNDS = 4


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Plan of one pipeline rank."""

    rank: int  # global rank
    layers: tuple[range, ...]  # of each chunk
    cost: RankCost
    activations: int  # peak bytes besides the state
    volumes: dict[str, Volume]  # by axis, in a step

    @property
    def peak(self) -> int:
        """Peak bytes of tensors."""
        return self.cost.state.total + self.activations


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """Memory, communication and bubble of a run."""

    stages: tuple[Stage, ...]  # in the order of the pipeline
    num_microbatches: int
    bubble: float  # idle over busy time, with stages of equal duration
    has_vocabulary: bool  # whether its size is known and counted
    loss_chunks: str | None  # log line, if the loss is computed in chunks

    @property
    def fullest(self) -> Stage:
        """The stage with the highest peak."""
        return max(self.stages, key=lambda stage: stage.peak)

    @property
    def number_of_fullest(self) -> int:
        """Index of the fullest stage; -1 for the last of several.

        With -1 it is also the last one for another number of stages.
        """
        number = self.stages.index(self.fullest)
        return -1 if number == len(self.stages) - 1 > 0 else number


@without_compiler()
def plan_run(
    config: RunConfig,
    rank: int = 0,
    *,
    only: int | None = None,
    memory: float | None = None,
) -> RunPlan:
    """Plan the pipeline group of ``rank``.

    ``only``: index of the single stage to plan; -1 is the last.  ``memory``: bytes of a device, if
    known; settings that depend on it are resolved with it.
    """
    if config.distillation.logits_save_dir is not None:
        # That run makes forward passes alone: plan the training of its model, which needs more.
        config = replace(config, distillation=DistillationConfig())
    vocabulary = known_padded_vocab_size(config)
    tp = config.model.tensor_model_parallel_size
    rows = vocabulary or config.language_model.make_vocab_size_divisible_by * tp
    if config.model.pipeline_split == "auto":
        config = resolve_pipeline_split(config, rows)
    if memory is not None:
        config = resolve_loss_chunks(config, rows, memory)
    model, batch = config.model, config.training.global_batch_size
    num_ranks = model.pipeline_model_parallel_size
    num_chunks = model.virtual_pipeline_model_parallel_size or 1
    per_step = config.training.micro_batch_size * config.data_parallel_size
    num_microbatches = max(1, batch // per_step)
    shown = min(
        num_microbatches, _ROUNDS * max(num_ranks, model.microbatch_group_size_per_vp_stage or 1)
    )
    if model.defer_embedding_wgrad_compute:  # its memory grows until the end of the step
        shown = num_microbatches
    placement, plan = plan_of(model, num_ranks, num_chunks, shown)
    pipeline = next(g for g in grids_of(config)[0].groups("pp") if rank in g)
    known: dict[Hashable, RankCost] = {}
    shapes = KnownShapes()
    ranges = layers_of_stages(config)
    stages = []
    planned = range(num_ranks) if only is None else [range(num_ranks)[only]]
    with Progress("planning", len(planned), "pipeline stages") as progress:
        for number in planned:
            layers = tuple(ranges[placement.stage(number, c)] for c in range(num_chunks))
            kind = _kind(config, placement, number, layers)
            if kind not in known:
                known[kind] = cost_of_rank(config, pipeline[number], rows, shapes)
            activations = activation_peak(
                plan[number],
                placement,
                number,
                known[kind],
                first_deferred=shown - (model.wgrad_deferral_limit or shown),
            )
            stages.append(
                Stage(
                    rank=pipeline[number],
                    layers=layers,
                    cost=known[kind],
                    activations=activations,
                    volumes=volumes(plan[number], known[kind], num_microbatches / shown),
                )
            )
            progress.add()
    return RunPlan(
        stages=tuple(stages),
        num_microbatches=num_microbatches,
        bubble=_bubble(plan, placement, shown, num_microbatches),
        has_vocabulary=vocabulary is not None,
        loss_chunks=chunk_line(config, rows),
    )


def _kind(
    config: RunConfig, placement: Placement, number: int, layers: tuple[range, ...]
) -> Hashable:
    """Return a key that is equal for pipeline ranks of equal cost.

    These have the same layers and the same ends of the model.
    """
    stages = [placement.stage(number, chunk) for chunk in range(placement.num_chunks)]
    behind = config.model.encoder_pipeline_model_parallel_size
    places = {0, behind - 1, behind, placement.num_stages - 1}
    ends = tuple(stage if stage in places else None for stage in stages)
    model = config.model
    per_layer = (model.window_attn_skip_freq, model.no_rope_freq)
    is_per_layer = any(value is not None for value in per_layer) or len(model.cp_comm_types) > 1
    if is_per_layer or layer_shapes(model) is not None:
        return ends, layers
    every = layers_of(config)
    return ends, tuple(tuple(every[i] for i in chunk) for chunk in layers)


def _bubble(
    plan: Sequence[Sequence[Instruction]],
    placement: Placement,
    num_shown: int,
    num_microbatches: int,
) -> float:
    """Return idle over busy time of a step, if passes of all stages take the same time.

    A backward pass takes twice the time if weight gradients have no passes of their own; transfers
    take none.  ``plan`` has ``num_shown`` of the ``num_microbatches`` micro-batches.
    """
    left = [deque(item for item in each if isinstance(item, Work)) for each in plan]
    has_weight_passes = any(work.kind == "weight" for work in left[0])
    now = [0.0] * len(plan)
    busy = [0.0] * len(plan)
    ends: dict[Pass | None, float] = {None: 0.0}
    while any(left):
        for rank, passes in enumerate(left):
            while passes:
                kind, microbatch, chunk = passes[0]
                stage = placement.stage(rank, chunk)
                source = inputs((kind, microbatch, stage), placement.num_stages)
                if source not in ends:
                    break
                passes.popleft()
                took = 1 if has_weight_passes or kind == "forward" else 2
                busy[rank] += took
                now[rank] = max(now[rank], ends[source]) + took
                ends[kind, microbatch, stage] = now[rank]
    finish = max(now) + (num_microbatches - num_shown) * max(busy) / num_shown
    return finish * len(plan) / (sum(busy) * num_microbatches / num_shown) - 1


def plan_lines(plan: RunPlan) -> Iterator[str]:
    """Yield the memory and the communication of each pipeline stage, and the pipeline bubble."""
    yield "memory of one rank of each pipeline stage, GiB (computed, tensors only):"
    rows = [
        ["stage", "rank", "layers", "parameters", "weights", "gradients", "optimizer"]
        + ["activations", "peak"]
    ]
    for number, stage in enumerate(plan.stages):
        state = stage.cost.state
        sizes = (state.parameters, state.gradients, state.optimizer, stage.activations, stage.peak)
        parts = [f"{r.start}-{r.stop - 1}" if r else "none" for r in stage.layers]
        layers = "+".join(parts) if len(parts) <= 3 else f"{parts[0]}+...+{parts[-1]}"
        rows.append(
            [str(number), str(stage.rank), layers, f"{stage.cost.num_parameters:,}"]
            + [f"{size / _GIB:.2f}" for size in sizes]
        )
    yield from _table(rows)
    on_host = max(stage.cost.state.host for stage in plan.stages)
    if on_host:
        yield f"optimizer in host memory, GiB of one rank: {on_host / _GIB:.2f}"
    if plan.loss_chunks is not None:
        yield plan.loss_chunks
    if not plan.has_vocabulary:
        yield "the vocabulary is not counted: --vocab-size says how large it is"
    yield ""
    yield from _communication(plan)
    yield ""
    yield (
        f"bubble: {plan.bubble:.1%} of the computing time with equal stages "
        f"({plan.num_microbatches} micro-batches a step)"
    )


def _communication(plan: RunPlan) -> Iterator[str]:
    used = [a for a in AXES if any(s.volumes[a].operations for s in plan.stages)]
    if not used:
        yield "communication: none"
        return
    yield "communication of one rank in a step, GiB sent (operations):"
    rows = [["stage", *used]]
    for number, stage in enumerate(plan.stages):
        found = [stage.volumes[axis] for axis in used]
        cells = [f"{v.sent_bytes / _GIB:.2f} ({v.operations:,.0f})" for v in found]
        rows.append([str(number), *cells])
    yield from _table(rows)


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the rows with right-aligned columns, each as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
