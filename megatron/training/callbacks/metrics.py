"""Collects the numbers of each step and hands them, once, to console, TensorBoard, W&B and file.

Order of collectives of a step: timers for TensorBoard (one all-gather, if asked for), then at the
--log-interval a barrier and, if asked for, one all-reduce of the energy; after the line the timers
for the console (one all-gather).  All ranks take part; the sinks stand on the last rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core import device
from megatron.core.device.async_host_copy import AsyncHostCopy
from megatron.core.diagnostics.timers import TENSORBOARD, largest_s
from megatron.training.callbacks.energy import EnergyMeter
from megatron.training.callbacks.interval import Interval
from megatron.training.callbacks.records import EvalRecord, SinkList, StepRecord
from megatron.training.callbacks.user_metrics import user_values
from megatron.training.estimates.peak_flops import Peak, device_peak
from megatron.training.estimates.theoretical_memory import print_memory
from megatron.training.runtime.runtime import (
    Callback,
    CheckpointEvent,
    EvalResult,
    PauseReason,
    Runtime,
)
from megatron.training.runtime.state import StepResult

# In the order in which they are printed.
TIMERS_TO_LOG = (
    "forward-backward forward-compute backward-compute batch-generator forward-recv forward-send "
    "backward-recv backward-send forward-send-forward-recv forward-send-backward-recv "
    "backward-send-forward-recv backward-send-backward-recv "
    "forward-backward-send-forward-backward-recv non-tensor-parallel-grads-all-reduce "
    "embedding-grads-all-reduce all-grads-sync params-all-gather optimizer-copy-to-main-grad "
    "optimizer-unscale-and-check-inf optimizer-clip-main-grad optimizer-count-zeros "
    "optimizer-inner-step optimizer-copy-main-to-model-params optimizer"
).split()
_INTERVAL_TIMER = "interval-time"


class Metrics(Callback):
    """The logging of a run.  ``sinks`` is empty on all ranks but the last."""

    def __init__(self, sinks: SinkList, energy: EnergyMeter | None = None) -> None:
        self._sinks = sinks
        self._energy = energy
        self._interval = Interval()
        self._peak: Peak | None = None
        self._steps_since_write = 0
        self._stall_s = 0.0  # in saves since the last write
        self._memory_is_reported = False
        self._in_loop = False
        # A step, its losses, and those of single layers with the values of users' metrics.
        self._late: tuple[StepRecord, dict[str, AsyncHostCopy], dict[str, AsyncHostCopy]] | None = (
            None
        )
        self._evaluated_at: dict[tuple[str, str], int] = {}  # split and suffix -> iteration

    def on_train_start(self, run: Runtime) -> None:
        if run.config.logging.log_throughput and run.is_last_loss_rank:
            self._peak = device_peak(run.config.model.params_dtype)
            self._peak = _announced(self._peak)
        if self._energy is not None:
            self._energy.start()
        run.timers(_INTERVAL_TIMER, log_level=0).start(barrier=True)
        self._in_loop = True

    def on_step_end(self, run: Runtime, result: StepResult) -> None:
        self._interval.add(run, result)
        self._steps_since_write += 1
        iteration = run.state.iteration
        is_due = iteration % run.config.logging.tensorboard_log_interval == 0
        is_shown = iteration % run.config.logging.log_interval == 0
        times = self._timer_values(run) | self._stall() if is_due else {}
        shown = self._end_interval(run) if is_shown else None
        self._write_late()
        values = (step_values(run, result) if is_due else {}) | times
        values |= interval_tags(run, shown or {})
        own: dict[str, Tensor | float] = {}
        if is_due or is_shown:
            own = user_values(run, result, {*values, *result.losses, *(shown or {})})
        if shown is not None:
            shown |= {tag: float(value) for tag, value in own.items()}
        if run.is_last_loss_rank and (is_due or is_shown):
            record = StepRecord(
                iteration=iteration,
                train_iters=run.train_iters,
                consumed_samples=run.state.consumed_train_samples,
                losses={},
                values=values,
                interval=shown,
            )
            self._late = (
                record,
                _late_reads(result.losses if is_due else {}),
                _late_reads({**result.layer_losses, **own} if is_due else {}),
            )
            if is_shown:
                self._write_late()
        if result.params_hash is not None and run.is_last_loss_rank:
            text = f"{result.params_hash:016x}"
            print(f" params hash at iteration {iteration:8d}: {text}", flush=True)
        if is_shown:
            run.timers.log(TIMERS_TO_LOG, normalizer=run.config.logging.log_interval)
            self._report_memory_once(run)

    def on_pause(self, run: Runtime, reason: PauseReason) -> None:
        self._write_late()
        if self._in_loop:
            run.timers(_INTERVAL_TIMER).stop()
            if self._energy is not None:
                self._energy.pause()

    def on_resume(self, run: Runtime, reason: PauseReason) -> None:
        if self._in_loop:
            run.timers(_INTERVAL_TIMER).start(barrier=True)
            if self._energy is not None:
                self._energy.resume()

    def on_eval_end(self, run: Runtime, result: EvalResult) -> None:
        self._write_late()
        if not run.is_last_loss_rank:
            return
        iteration = run.state.iteration
        suffix = "" if result.set_index is None else f"-{result.set_index}"
        before = self._evaluated_at.get((result.split, suffix))
        self._evaluated_at[result.split, suffix] = iteration
        self._sinks.write_eval(
            EvalRecord(
                iteration=iteration,
                consumed_samples=run.state.consumed_train_samples,
                losses=dict(result.losses),
                split=result.split,
                suffix=suffix,
                is_final=result.is_final,
                is_repeated=result.is_final and before == iteration,
            )
        )

    def on_checkpoint(self, run: Runtime, event: CheckpointEvent) -> None:
        self._stall_s += event.stall_s

    def on_train_end(self, run: Runtime) -> None:
        self._write_late()
        if self._in_loop:
            run.timers(_INTERVAL_TIMER).stop()
        self._in_loop = False

    def close(self) -> None:
        self._write_late()
        self._sinks.close()
        if self._energy is not None:
            self._energy.close()

    def writers(self) -> Mapping[str, Any]:
        return self._sinks.writers()

    def _write_late(self) -> None:
        """Hand the last step to the sinks: its losses are read when the next one is under way."""
        if self._late is not None:
            record, losses, layers = self._late
            self._late = None
            values = {**record.values, **_values_of(layers)}
            self._sinks.write_step(replace(record, losses=_values_of(losses), values=values))

    def _timer_values(self, run: Runtime) -> dict[str, float]:
        """Seconds per step since the last write.  Collective if timers are to be written."""
        if not run.config.logging.log_timers_to_tensorboard:
            return {}
        times_s = run.timers.times_s(TIMERS_TO_LOG, reader=TENSORBOARD)
        steps, self._steps_since_write = self._steps_since_write, 0
        return {f"{name}-time": t / steps for name, t in largest_s(times_s).items()}

    def _stall(self) -> dict[str, float]:
        """Seconds that training stood still for checkpoints since the last write."""
        stall_s, self._stall_s = self._stall_s, 0.0
        return {"save-checkpoint-time": stall_s} if stall_s else {}

    def _end_interval(self, run: Runtime) -> dict[str, float] | None:
        """The fields of the console line, on the last rank.  Collective."""
        elapsed_s = run.timers(_INTERVAL_TIMER).elapsed(barrier=True)
        joules = None if self._energy is None else self._energy.lap_joules()
        ended, self._interval = self._interval, Interval()
        return ended.fields(run, elapsed_s, joules, self._peak) if run.is_last_loss_rank else None

    def _report_memory_once(self, run: Runtime) -> None:
        if self._memory_is_reported:
            return
        self._memory_is_reported = True
        if run.is_rank_0:
            num_microbatches = run.batches.num_microbatches(run.state.consumed_train_samples)
            print_memory(run.config, run.padded_vocab_size, num_microbatches)
        if run.groups.dp.rank() == 0:
            print(memory_line(run.state.iteration), flush=True)


def _announced(peak: Peak) -> Peak | None:
    """``peak`` if MFU can be computed from it; says which it is, or why there is none."""
    if peak.problem is not None:
        print(f" > MFU omitted: {peak.problem}", flush=True)
        return None
    print(
        f" > MFU: model FLOPs with causal attention, as a share of "
        f"{peak.flops_per_s / 1e12:.4g} TFLOP/s per rank ({peak.source})",
        flush=True,
    )
    return peak


def _late_reads(losses: Mapping[str, Tensor | float]) -> dict[str, AsyncHostCopy]:
    return {key: AsyncHostCopy(torch.as_tensor(loss)) for key, loss in losses.items()}


def _values_of(reads: Mapping[str, AsyncHostCopy]) -> dict[str, float]:
    return {key: read.get() for key, read in reads.items()}


def step_values(run: Runtime, result: StepResult) -> dict[str, float]:
    """This step's numbers under their TensorBoard tags, without the losses."""
    logging = run.config.logging
    values: dict[str, float | None] = {
        "learning-rate": result.learning_rate,
        "decoupled-learning-rate": result.decoupled_learning_rate,
        "skipped-train-samples": run.state.skipped_train_samples or None,
        "batch-size": result.batch_size,
        "loss-scale": result.loss_scale,
        "world-size": run.config.world_size if logging.log_world_size_to_tensorboard else None,
        "grad-norm": None if result.grad_norm is None else float(result.grad_norm),
        "num-zeros": result.num_zeros,
        "params-norm": result.params_norm,
        # as many bits as TensorBoard holds; all of them are in the log
        "params-hash": None if result.params_hash is None else result.params_hash >> 40,
    }
    if logging.log_memory_to_tensorboard:
        stats = device.memory_stats()
        values |= {
            "mem-reserved-bytes": stats["reserved"],
            "mem-allocated-bytes": stats["allocated"],
            "mem-max-allocated-bytes": stats["max_allocated"],
            "mem-allocated-count": stats["allocated_count"],
        }
    return {tag: value for tag, value in values.items() if value is not None}


def interval_tags(run: Runtime, shown: Mapping[str, float]) -> dict[str, float]:
    """Tag -> number, of those fields of the line that TensorBoard gets as well."""
    tags = {
        "energy per GPU (J/iter/GPU)": "iter-energy/gpu",
        "power per GPU (W/GPU)": "power/gpu",
        "tokens/s": "tokens/s",
        "MFU": "MFU",
    }
    values = {tag: shown[label] for label, tag in tags.items() if label in shown}
    if shown and run.config.logging.log_timers_to_tensorboard:
        values["iteration-time"] = shown["elapsed time per iteration (ms)"] / 1000.0
        if "throughput per GPU (TFLOP/s/GPU)" in shown:
            values["throughput"] = shown["throughput per GPU (TFLOP/s/GPU)"]
    return values


def memory_line(iteration: int) -> str:
    """Device memory of this rank in MiB."""
    stats = device.memory_stats()
    rank = dist.get_rank() if dist.is_initialized() else 0
    parts = [
        f"{label}: {stats[key] / 2**20}"
        for label, key in (
            ("allocated", "allocated"),
            ("max allocated", "max_allocated"),
            ("reserved", "reserved"),
            ("max reserved", "max_reserved"),
        )
    ]
    return f"[Rank {rank}] (after {iteration} iterations) memory (MB) | {' | '.join(parts)}"
