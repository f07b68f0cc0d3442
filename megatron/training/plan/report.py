"""The plan of a run as lines of text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron.training.plan.communication import AXES
from megatron.training.plan.stages import RunPlan, Stage

GIB = 2**30


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
        rows.append(
            [str(number), str(stage.rank), _layers(stage), f"{stage.cost.num_parameters:,}"]
            + [f"{size / GIB:.2f}" for size in sizes]
        )
    yield from _table(rows)
    on_host = max(stage.cost.state.host for stage in plan.stages)
    if on_host:
        yield f"optimizer in host memory, GiB of one rank: {on_host / GIB:.2f}"
    if plan.loss_chunks is not None:
        yield plan.loss_chunks
    if not plan.has_vocabulary:
        yield "the vocabulary is not counted: --vocab-size says how large it is"
    yield ""
    yield from _communication(plan)
    yield ""
    yield (
        f"bubble: {plan.bubble:.1%} of the computing time with equal stages, "
        f"{plan.bubble_of_stages:.1%} with these ({plan.num_microbatches} micro-batches a step)"
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
        cells = [f"{v.sent_bytes / GIB:.2f} ({v.operations:,.0f})" for v in found]
        rows.append([str(number), *cells])
    yield from _table(rows)


def _layers(stage: Stage) -> str:
    """Return the layers of a stage as text: 0-11, or 0-1+8-9 for several chunks."""
    parts = [f"{r.start}-{r.stop - 1}" if r else "none" for r in stage.layers]
    return "+".join(parts) if len(parts) <= 3 else f"{parts[0]}+...+{parts[-1]}"


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the rows with right-aligned columns, each as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
