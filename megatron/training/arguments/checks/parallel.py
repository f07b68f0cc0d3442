"""Rules about how the world is cut up."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.training.config.run import RunConfig


def degrees_fit_the_world(run: RunConfig) -> Iterator[str]:
    """A replica takes tp x pp x cp ranks, and replicas are whole."""
    m = run.model
    tp, pp, cp = (
        m.tensor_model_parallel_size,
        m.pipeline_model_parallel_size,
        m.context_parallel_size,
    )
    if run.world_size % (tp * pp * cp):
        yield (
            f"{run.world_size} ranks cannot be cut into replicas of --tensor-model-parallel-size "
            f"{tp} x --pipeline-model-parallel-size {pp} x --context-parallel-size {cp} = "
            f"{tp * pp * cp}: start a multiple of {tp * pp * cp} ranks"
        )


def heads_fit_tensor_parallel(run: RunConfig) -> Iterator[str]:
    """Heads are dealt out whole."""
    m = run.model
    tp = m.tensor_model_parallel_size
    for flag, count in (
        ("--num-attention-heads", m.num_attention_heads),
        ("--num-query-groups", m.num_query_groups),
    ):
        if count % tp:
            yield f"{flag} {count} is not a multiple of --tensor-model-parallel-size {tp}"


CHECKS = (degrees_fit_the_world, heads_fit_tensor_parallel)
