"""Find the cheapest single change with which a run fits the memory of its devices.

Candidates are tried in the order of their cost; each is planned as the run was.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace

from megatron.core.config.errors import ConfigError
from megatron.training.arguments.resolve import resolve
from megatron.training.config.run import RunConfig
from megatron.training.planning.run_plan import plan_run

_CHUNK = 1024  # tokens whose logits exist at a time


def changes(config: RunConfig) -> Iterator[dict[str, object]]:
    """Yield possible changes of arguments, dest -> value, the cheapest first."""
    m = config.model
    training = config.training
    tp, pp = m.tensor_model_parallel_size, m.pipeline_model_parallel_size
    if tp > 1 and not m.sequence_parallel:
        yield {"sequence_parallel": True}
    if config.data_parallel_size > 1 and not config.optimizer.use_distributed_optimizer:
        yield {"use_distributed_optimizer": True}
    if m.recompute_granularity is None:
        yield {"recompute_granularity": "selective"}
    batch = training.micro_batch_size
    tokens = batch * config.data.seq_length // m.context_parallel_size
    if not m.loss_chunk_size and tokens >= 2 * _CHUNK and not m.defer_embedding_wgrad_compute:
        yield {"loss_chunk_size": _CHUNK}
    if batch % 2 == 0:
        yield {"micro_batch_size": batch // 2}
    if m.recompute_granularity != "full":
        values = {"granularity": "full", "method": "uniform", "num_layers": 1}
        yield {f"recompute_{key}": value for key, value in values.items()}
    yield {"tensor_model_parallel_size": 2 * tp, "sequence_parallel": True}
    yield {"pipeline_model_parallel_size": 2 * pp}


def fits(
    args: Namespace, config: RunConfig, fullest: int, limit: float
) -> Iterator[tuple[str, int]]:
    """Yield the flags of each change that no rule refuses, and the peak of the fullest rank.

    Plans stage ``fullest`` first, and the others only if that one fits into ``limit`` bytes.
    """
    for values in changes(config):
        try:
            given = Namespace(**{**vars(args), **values})
            changed = resolve(given, config.world_size, trains=config.trains)
        except ConfigError:
            continue
        changed = replace(changed, tokenizer=config.tokenizer)  # whose vocabulary is known
        plan = plan_run(changed, args.check_rank, only=fullest, memory=limit)
        if plan.fullest.peak <= limit:
            plan = plan_run(changed, args.check_rank, memory=limit)
        flags = [
            f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}")
            for name, value in values.items()
        ]
        yield " ".join(flags), plan.fullest.peak
