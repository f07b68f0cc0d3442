"""Find the cheapest single change with which a run fits the memory of its devices.

Candidates are tried in the order of their cost; each is planned as the run was.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from megatron.core.config.errors import ConfigError
from megatron.training.arguments.resolve import resolve
from megatron.training.config.run import RunConfig
from megatron.training.planning.run_plan import plan_run

_CHUNK = 1024  # tokens whose logits exist at a time


class Change(NamedTuple):
    """Flags as a user types them, and the arguments that they set: dest -> value."""

    words: str
    values: dict[str, object]


class Fit(NamedTuple):
    """A change, and the peak bytes of the fullest rank with it."""

    change: Change
    peak: int


def changes(config: RunConfig) -> Iterator[Change]:
    """Yield possible changes, the cheapest first."""
    m, training = config.model, config.training
    tp, pp = m.tensor_model_parallel_size, m.pipeline_model_parallel_size
    if tp > 1 and not m.sequence_parallel:
        yield Change("--sequence-parallel", {"sequence_parallel": True})
    if config.data_parallel_size > 1 and not config.optimizer.use_distributed_optimizer:
        yield Change("--use-distributed-optimizer", {"use_distributed_optimizer": True})
    if m.recompute_granularity is None:
        yield Change("--recompute-granularity selective", {"recompute_granularity": "selective"})
    batch = training.micro_batch_size
    tokens = batch * config.data.seq_length // m.context_parallel_size
    if not m.loss_chunk_size and tokens >= 2 * _CHUNK and not m.defer_embedding_wgrad_compute:
        yield Change(f"--loss-chunk-size {_CHUNK}", {"loss_chunk_size": _CHUNK})
    if batch % 2 == 0:
        yield Change(f"--micro-batch-size {batch // 2}", {"micro_batch_size": batch // 2})
    if m.recompute_granularity != "full":
        values = {"granularity": "full", "method": "uniform", "num_layers": 1}
        yield Change(
            " ".join(f"--recompute-{k.replace('_', '-')} {v}" for k, v in values.items()),
            {f"recompute_{key}": value for key, value in values.items()},
        )
    yield Change(
        f"--tensor-model-parallel-size {2 * tp} --sequence-parallel",
        {"tensor_model_parallel_size": 2 * tp, "sequence_parallel": True},
    )
    yield Change(
        f"--pipeline-model-parallel-size {2 * pp}", {"pipeline_model_parallel_size": 2 * pp}
    )


def fits(args: Namespace, config: RunConfig, fullest: int, limit: float) -> Iterator[Fit]:
    """Yield each change that no rule refuses, with the peak bytes of the fullest rank.

    Plans stage ``fullest`` first, and the others only if that one fits into ``limit`` bytes.
    """
    for change in changes(config):
        try:
            given = Namespace(**{**vars(args), **change.values})
            changed = resolve(given, config.world_size, trains=config.trains)
        except ConfigError:
            continue
        changed = replace(changed, tokenizer=config.tokenizer)  # whose vocabulary is known
        plan = plan_run(changed, args.check_rank, only=fullest, memory=limit)
        if plan.fullest.peak <= limit:
            plan = plan_run(changed, args.check_rank, memory=limit)
        yield Fit(change, plan.fullest.peak)
