"""Evaluation: the step without backward, on the same samples in every pass.

Order of collectives: those of the forward passes, then one all-reduce per loss key over dp_cp.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal

import torch

from megatron.core.faults import fault_point
from megatron.training.callbacks.base import EvalResult
from megatron.training.runtime import Runtime
from megatron.training.step import forward_backward, reduce_losses, sum_losses
from megatron.training.utils import print_rank_0


def evaluate_all(run: Runtime, *, is_final: bool = False) -> list[EvalResult]:
    """Evaluate every validation set; each starts at its first sample.  Collective."""
    several = len(run.valid_loaders) > 1
    return [
        evaluate(run, loader, set_index=i if several else None, is_final=is_final)
        for i, loader in enumerate(run.valid_loaders)
    ]


def evaluate(
    run: Runtime,
    loader: Any,
    *,
    split: Literal["validation", "test"] = "validation",
    set_index: int | None = None,
    is_final: bool = False,
) -> EvalResult:
    """Mean losses over ``--eval-iters`` global batches, or the whole set.  Collective."""
    config = run.config
    num_microbatches = run.batches.num_microbatches_at_full_size()
    batch_size = run.batches.full_global_batch_size
    eval_iters = number_of_eval_iters(run, loader)
    if is_final:
        print_rank_0(f"Evaluating on {eval_iters * batch_size} samples")
    data: Iterator[Any] | None = iter(loader) if loader is not None else None
    for chunk in run.model_chunks:
        chunk.eval()
    totals: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for i in range(eval_iters):
            if is_final and i % config.logging.log_interval == 0:
                print_rank_0(f"Evaluating iter {i + 1}/{eval_iters}")
            fault_point("evaluate.iter", step=i)
            reported = forward_backward(run, data, num_microbatches, forward_only=True)
            for key, pair in sum_losses(reported).items():
                totals[key] = totals[key] + pair if key in totals else pair
    for chunk in run.model_chunks:
        chunk.train()
    reduced = reduce_losses([totals], run.groups.dp_cp) if run.groups.is_last_stage else {}
    return EvalResult(
        losses={key: float(value) for key, value in reduced.items()},
        split=split,
        set_index=set_index,
        is_final=is_final,
    )


def number_of_eval_iters(run: Runtime, loader: Any) -> int:
    """Global batches of one pass: ``--eval-iters``, or all whole ones with --full-validation."""
    if not run.config.validation.full_validation or loader is None:
        return run.config.validation.eval_iters
    samples = len(loader.dataset)
    return max(1, math.floor(samples / run.batches.full_global_batch_size))
