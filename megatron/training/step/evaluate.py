"""Evaluation: forward passes over the same samples each time; agreement on stop requests.

Order of collectives: those of the forward passes, then one all-reduce per loss key over dp_cp.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sized
from typing import Any, Literal, Protocol

import torch

from megatron.core.config.errors import DataError
from megatron.core.diagnostics.fault_injection import fault_point
from megatron.core.parallel.collectives import largest_of_ranks
from megatron.training.data.loaders import agree_on, chunk_iterators
from megatron.training.process.exit_report import in_phase
from megatron.training.process.rank_print import print_detail, print_rank_0
from megatron.training.process.signals import StopSignal, catch_stop_signal
from megatron.training.runtime.context import RunContext
from megatron.training.step.run import EvalResult, ModelRun
from megatron.training.step.step_result import reduce_losses, sum_losses
from megatron.training.step.train_step import forward_backward


class Loader(Protocol):
    """Loader of the micro-batches of a data set; each `iter` begins at the first one."""

    dataset: Sized

    def __iter__(self) -> Iterator[object]: ...


def evaluate_all(run: ModelRun, *, is_final: bool = False) -> list[EvalResult]:
    """Evaluate every validation set from its first sample on.  Collective over all ranks."""
    several = len(run.data.valid_loaders) > 1
    results = (
        evaluate(run, loader, set_index=i if several else None, is_final=is_final)
        for i, loader in enumerate(run.data.valid_loaders)
    )
    return [result for result in results if result is not None]


@in_phase("evaluation")
def evaluate(
    run: ModelRun,
    loader: Loader | None,
    *,
    split: Literal["validation", "test"] = "validation",
    set_index: int | None = None,
    is_final: bool = False,
) -> EvalResult | None:
    """Return the mean losses over --eval-iters global batches.  Collective over all ranks.

    With --full-validation, a validation set is evaluated completely.  Returns None if the time
    limit of --exit-duration-in-mins or a stop signal ends the evaluation early.
    """
    config = run.config
    num_microbatches = run.batches.num_microbatches_at_full_size()
    batch_size = run.batches.full_global_batch_size
    eval_iters = config.validation.eval_iters
    if config.validation.full_validation and split == "validation":
        eval_iters = whole_pass_iters(run, loader)
    if is_final:
        print_detail(f"Evaluating on {eval_iters * batch_size} samples")
    data = chunk_iterators(run, None if loader is None else _repeat(run, loader, split))
    for chunk in run.model_chunks:
        chunk.eval()
    totals: dict[str, torch.Tensor] = {}
    hurry: str | None = None
    with torch.no_grad():
        for i in range(eval_iters):
            if is_final and i % config.logging.log_interval == 0:
                print_detail(f"Evaluating iter {i + 1}/{eval_iters}")
            run.callbacks.on_eval_step_start(run)
            fault_point("evaluate.iter", step=i)
            reported = forward_backward(run, data, num_microbatches, forward_only=True)
            totals = sum_losses([totals, sum_losses(reported)])
            run.callbacks.on_eval_step_end(run)
            hurry = reason_to_hurry(run)
            if hurry is not None:
                print_rank_0(f"Exiting during evaluation, {hurry}")
                break
        else:
            _report_non_loss_data(run, loader)
    for chunk in run.model_chunks:
        chunk.train()
    if hurry is not None:
        return None
    reduced = reduce_losses([totals], run.groups.dp_cp) if run.has_loss else {}
    return EvalResult(
        losses={key: float(value) for key, value in reduced.items()},
        split=split,
        set_index=set_index,
        is_final=is_final,
    )


def _repeat(run: ModelRun, loader: Any, split: str) -> Iterator[object]:
    """Yield the micro-batches of ``loader`` again and again: a set without weights may be short."""
    while True:
        is_empty = True
        for batch in loader:
            is_empty = False
            yield batch
        if is_empty:
            at_once = run.config.training.micro_batch_size * run.groups.dp.size()
            raise DataError(
                f"the {split} data has fewer samples than all ranks read at once, {at_once}: give "
                "it a larger share in --split, or no use (--eval-iters 0)"
            )


def _report_non_loss_data(run: ModelRun, loader: Loader | None) -> None:
    """Call the program's ``process_non_loss_data_func`` on the rank with the TensorBoard writer.

    Its data comes from the program's ``non_loss_data_func``, or else from one more forward pass
    over the first global batch.  Collective over all ranks.
    """
    process = run.process_non_loss_data_func
    if run.non_loss_data_func is not None:
        collected = run.non_loss_data_func(run.model_chunks)
    elif process is not None:
        collected = forward_backward(
            run,
            chunk_iterators(run, loader),
            run.batches.num_microbatches_at_full_size(),
            forward_only=True,
            collect_non_loss_data=True,
        )
    writer = run.callbacks.writers().get("tensorboard")  # None except on the last rank
    if process is not None and writer is not None:
        process(collected, run.state.iteration, writer)


def whole_pass_iters(run: ModelRun, loader: Loader | None) -> int:
    """Return the number of global batches in a complete pass, an incomplete last one included.

    Collective over mp: ranks that do not read data have no loader.
    """
    samples = 0 if loader is None else len(loader.dataset)
    (samples,) = agree_on(run.groups.mp, samples)
    return max(1, math.ceil(samples / run.batches.full_global_batch_size))


def received_anywhere(stop_signal: StopSignal) -> bool:
    """Return whether any rank has received the signal.  Collective over all ranks."""
    return any(largest_of_ranks([stop_signal.received]))


def reason_to_hurry(run: RunContext) -> str | None:
    """Return why an evaluation must end early, or None; the loop then stops for the same reason.

    Collective over all ranks if --exit-duration-in-mins or --exit-signal-handler is given.
    """
    if minutes_over_limit(run) is not None:
        return "timelimit reached"
    if run.config.training.exit_signal_handler:
        stop_signal = catch_stop_signal()
        if received_anywhere(stop_signal):
            return f"{stop_signal.name} received"
    return None


def minutes_over_limit(run: RunContext) -> float | None:
    """Return the run time in minutes once it exceeds --exit-duration-in-mins, otherwise None.

    The result is the same on all ranks: the time of the rank that started first.  Collective over
    all ranks if the flag is given.
    """
    limit = run.config.training.exit_duration_in_mins
    if not limit:
        return None
    (minutes,) = largest_of_ranks([(time.time() - run.started_at_s) / 60.0])
    return minutes if minutes > limit else None
