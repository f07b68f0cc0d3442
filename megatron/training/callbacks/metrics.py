"""Collect the metrics of each step and write them once to all sinks.

Order of collectives in a step: timers for TensorBoard (one all-gather, if requested); at the
--log-interval a barrier and, with --log-energy, one all-reduce; with --log-loss-by-source the
counts of sources (one all-reduce, also before a save); with --moe-per-layer-logging the load of
experts (one all-reduce); after the line is printed, timers for the console (one
all-gather).  All ranks take part; only the last rank has sinks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core import device
from megatron.core.device.async_host_copy import AsyncHostCopy
from megatron.core.diagnostics.energy import EnergyMonitor
from megatron.core.diagnostics.timers import TENSORBOARD, largest_s
from megatron.core.transformer.layer_layout import has_experts
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.routing import RoutingResult
from megatron.training.callbacks.sinks import EvalRecord, Sink, StepRecord
from megatron.training.callbacks.user import user_values
from megatron.training.checkpointing.checkpointer import CheckpointEvent
from megatron.training.estimates.flops import (
    causal_model_flops,
    known_peak,
    num_floating_point_operations,
)
from megatron.training.estimates.theoretical_memory import print_memory
from megatron.training.process.rank_print import is_short, print_device_memory
from megatron.training.runtime.context import StepResult
from megatron.training.step.run import (
    Callback,
    EvalResult,
    ModelRun,
    PauseReason,
    TrainingRun,
    call_each,
)

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
    """Callback that logs a run.

    ``sinks`` is empty on all ranks but the last.  One that fails is removed with a warning and does
    not end training.
    """

    def __init__(self, sinks: list[Sink], energy: EnergyMonitor | None = None) -> None:
        self._sinks = sinks
        self._energy = energy
        self._interval = Interval()
        self._peak_flops_per_s: float | None = None
        self._steps_since_write = 0
        self._stall_s = 0.0  # time spent in saves since the last write
        self._memory_is_reported = False
        self._in_loop = False
        self._pending: _PendingRecord | None = None
        self._evaluated_at: dict[tuple[str, str], int] = {}  # split and suffix -> iteration
        self._expert_load: ExpertLoad | None = None

    def on_train_start(self, run: TrainingRun) -> None:
        if run.config.logging.log_throughput and run.is_last_loss_rank:
            name = device.name()
            self._peak_flops_per_s = peak = known_peak(name)
            text = f" omitted: the peak FLOP/s of {name} is not known"
            if peak is not None:
                text = (
                    f": model FLOPs with causal attention, as a share of {peak / 1e12:.4g} "
                    f"TFLOP/s per rank (dense bf16 peak of {name})"
                )
            print(f" > MFU{text}", flush=True)
        if run.config.logging.moe_per_layer_logging and run.config.model.num_moe_experts:
            self._expert_load = ExpertLoad(run)
        if self._energy is not None:
            self._energy.resume()
        run.timers(_INTERVAL_TIMER, log_level=0).start(barrier=True)
        self._in_loop = True

    def on_step_end(self, run: TrainingRun, result: StepResult) -> None:
        self._interval.add(run, result)
        if run.sources is not None and not result.skipped:
            run.sources.end_step()
        self._steps_since_write += 1
        iteration = run.state.iteration
        is_due = iteration % run.config.logging.tensorboard_log_interval == 0
        is_shown = iteration % run.config.logging.log_interval == 0
        values = self._times(run) if is_due else {}
        shown = self._end_interval(run) if is_shown else None
        by_source: dict[str, float] = {}
        if run.sources is not None and is_shown:
            run.sources.collect(run.groups, has_loss=run.has_loss)
            shown_by_source, by_source = run.sources.end_interval()
            shown = shown and shown | shown_by_source
        self._write_pending()
        if is_due or is_shown:
            if is_due:
                values |= step_values(run, result)
            values |= interval_tags(run, shown or {}) | by_source
            load = self._expert_load.read(run) if is_due and self._expert_load is not None else {}
            own = user_values(run, result, {*values, *result.losses, *(shown or {})})
            if shown is not None:
                shown |= {tag: float(value) for tag, value in own.items()}
            if run.is_last_loss_rank:
                record = StepRecord(
                    iteration=iteration,
                    train_iters=run.train_iters,
                    consumed_samples=run.state.consumed_train_samples,
                    losses={},
                    values=values,
                    interval=shown,
                )
                self._pending = _PendingRecord(
                    record,
                    _copies(result.losses if is_due else {}),
                    _copies({**result.layer_losses, **load, **own} if is_due else {}),
                )
        if is_shown:
            self._write_pending()
        if result.params_hash is not None and run.is_last_loss_rank:
            text = f"{result.params_hash:016x}"
            print(f" params hash at iteration {iteration:8d}: {text}", flush=True)
        if is_shown:
            run.timers.log(TIMERS_TO_LOG, normalizer=run.config.logging.log_interval)
            if not self._memory_is_reported:
                self._report_memory(run)
        every = run.config.logging.log_memory_interval
        if every and iteration % every == 0 and run.groups.dp.rank() == 0:
            print_device_memory(f"(after {iteration} iterations)")

    def on_pause(self, run: TrainingRun, reason: PauseReason) -> None:
        self._write_pending()
        if run.sources is not None and reason == "checkpoint":
            run.sources.collect(run.groups, has_loss=run.has_loss)
        if self._in_loop:
            run.timers(_INTERVAL_TIMER).stop()
            if self._energy is not None:
                self._energy.pause()

    def on_resume(self, run: TrainingRun, reason: PauseReason) -> None:
        if self._in_loop:
            run.timers(_INTERVAL_TIMER).start(barrier=True)
            if self._energy is not None:
                self._energy.resume()

    def on_eval_end(self, run: ModelRun, result: EvalResult) -> None:
        self._write_pending()
        if not run.is_last_loss_rank:
            return
        iteration = run.state.iteration
        suffix = "" if result.set_index is None else f"-{result.set_index}"
        before = self._evaluated_at.get((result.split, suffix))
        self._evaluated_at[result.split, suffix] = iteration
        record = EvalRecord(
            iteration=iteration,
            consumed_samples=run.state.consumed_train_samples,
            losses=dict(result.losses),
            split=result.split,
            suffix=suffix,
            is_final=result.is_final,
        )
        is_same = before == iteration and not run.config.checkpoint.save_best  # loads the best
        is_repeated = result.is_final and is_same

        def write(sink: Sink) -> None:
            if sink.takes_repeated_evals or not is_repeated:
                sink.write_eval(record)

        call_each(self._sinks, write)

    def on_checkpoint(self, run: TrainingRun, event: CheckpointEvent) -> None:
        self._stall_s += event.stall_s

    def on_train_end(self, run: TrainingRun) -> None:
        self._write_pending()
        if self._in_loop:
            run.timers(_INTERVAL_TIMER).stop()
        self._in_loop = False

    def close(self) -> None:
        self._write_pending()
        call_each(self._sinks, lambda sink: sink.close())
        self._sinks.clear()
        if self._energy is not None:
            self._energy.shutdown()

    def writers(self) -> Mapping[str, Any]:
        return {sink.name: sink.writer for sink in self._sinks if sink.writer is not None}

    def _write_pending(self) -> None:
        """Write the pending record to the sinks.

        The values of a step are written after the next step was launched, so that reading the
        losses does not leave the device idle.
        """
        if self._pending is None:
            return
        record, losses, others = self._pending
        self._pending = None
        values = {**record.values, **_read(others)}
        record = replace(record, losses=_read(losses), values=values)
        call_each(self._sinks, lambda sink: sink.write_step(record))

    def _times(self, run: TrainingRun) -> dict[str, float]:
        """Return the seconds per step of timers since the last write, and those of saves in all.

        Collective over all ranks if --log-timers-to-tensorboard is set.
        """
        times: dict[str, float] = {}
        if run.config.logging.log_timers_to_tensorboard:
            largest = largest_s(run.timers.times_s(TIMERS_TO_LOG, reader=TENSORBOARD))
            times = {f"{name}-time": t / self._steps_since_write for name, t in largest.items()}
            self._steps_since_write = 0
        if self._stall_s:
            times["save-checkpoint-time"] = self._stall_s
            self._stall_s = 0.0
        return times

    def _end_interval(self, run: TrainingRun) -> dict[str, float] | None:
        """Return the fields of the console line on the last rank.  Collective over all ranks."""
        elapsed_s = run.timers(_INTERVAL_TIMER).elapsed(barrier=True)
        joules = None if self._energy is None else self._energy.lap()
        ended, self._interval = self._interval, Interval()
        if not run.is_last_loss_rank:
            return None
        return ended.fields(run, elapsed_s, joules, self._peak_flops_per_s)

    def _report_memory(self, run: TrainingRun) -> None:
        self._memory_is_reported = True
        if is_short():
            return
        if run.is_rank_0:
            num_microbatches = run.batches.num_microbatches(run.state.consumed_train_samples)
            print_memory(run.config, run.padded_vocab_size, num_microbatches)
        if run.groups.dp.rank() == 0:
            print_device_memory(f"(after {run.state.iteration} iterations)")


def interval_tags(run: TrainingRun, shown: Mapping[str, float]) -> dict[str, float]:
    """Return tag -> value of the console fields that TensorBoard also receives."""
    tags = {
        "energy per GPU (J/iter/GPU)": "iter-energy/gpu",
        "power per GPU (W/GPU)": "power/gpu",
        "tokens/s": "tokens/s",
        "MFU": "MFU",
    }
    if run.config.logging.log_timers_to_tensorboard:
        tags["throughput per GPU (TFLOP/s/GPU)"] = "throughput"
    values = {tag: shown[label] for label, tag in tags.items() if label in shown}
    if shown and run.config.logging.log_timers_to_tensorboard:
        values["iteration-time"] = shown["elapsed time per iteration (ms)"] / 1000.0
    return values


class _PendingRecord(NamedTuple):
    """A record, and values of it that are on their way to the host."""

    record: StepRecord
    losses: dict[str, AsyncHostCopy]
    others: dict[str, AsyncHostCopy]


def _copies(values: Mapping[str, Tensor | float]) -> dict[str, AsyncHostCopy]:
    return {key: AsyncHostCopy(torch.as_tensor(value)) for key, value in values.items()}


def _read(copies: Mapping[str, AsyncHostCopy]) -> dict[str, float]:
    return {key: copy.get() for key, copy in copies.items()}


def step_values(run: TrainingRun, result: StepResult) -> dict[str, float]:
    """Return by TensorBoard tag the values at the end of a step, without the losses."""
    logging = run.config.logging
    values: dict[str, float | None] = {
        "skipped-train-samples": run.state.skipped_train_samples or None,
        "batch-size": result.batch_size,
        "world-size": run.config.world_size if logging.log_world_size_to_tensorboard else None,
        "learning-rate": result.learning_rate,
        "decoupled-learning-rate": result.decoupled_learning_rate,
        "loss-scale": result.loss_scale,
        "grad-norm": None if result.grad_norm is None else float(result.grad_norm),
        "num-zeros": result.num_zeros,
        "params-norm": result.params_norm,
        # the bits that a TensorBoard float holds; the log has all 64
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


class ExpertLoad:
    """Load of the fullest expert of each layer: its tokens over the mean, 1 when balanced.

    Counts the tokens of training steps at the routers of this rank.
    """

    def __init__(self, run: TrainingRun) -> None:
        model = run.config.model
        num_layers = model.num_layers + model.num_layers_ahead
        self._layers = [i for i in range(num_layers) if has_experts(model, i)]
        assert model.num_moe_experts is not None, "the model has experts"
        self._counts = torch.zeros(num_layers, model.num_moe_experts, device=device.current())
        for chunk in run.model_chunks:
            for module in chunk.modules():
                if isinstance(module, TopKRouter):
                    module.register_forward_hook(self._count)

    def _count(self, router: TopKRouter, inputs: object, routing: RoutingResult) -> None:
        if router.training and torch.is_grad_enabled():
            self._counts[router.layer_number - 1] += routing.counts()

    def read(self, run: TrainingRun) -> dict[str, Tensor]:
        """Return tag -> load over the steps since the last call.  Collective over all ranks."""
        total = self._counts.clone()
        self._counts.zero_()
        if run.groups.world.size() > 1:
            dist.all_reduce(total, group=run.groups.world)
        load = total.amax(1) / total.mean(1).clamp(min=1e-9)
        return {f"moe/load_layer_{i}": load[i] for i in self._layers}


_Sums = dict[str, tuple[Tensor | float, int]]


class Interval:
    """Sums over the steps of an interval; reads no value from the device before `fields`."""

    def __init__(self) -> None:
        self._last: StepResult | None = None
        self._num_steps = 0
        self._num_skipped = 0
        self._num_nan = 0
        self._num_tokens = 0
        self._flops = 0.0  # by Megatron-LM's formula
        self._causal_flops = 0.0
        # Loss -> sum and number of values, of steps with an update and of skipped steps.
        self._losses: tuple[_Sums, _Sums] = {}, {}

    def add(self, run: TrainingRun, result: StepResult) -> None:
        """Add one step."""
        self._last = result
        self._num_skipped += int(result.skipped)
        self._num_nan += int(result.nan)
        sums = self._losses[result.skipped]
        for key, value in result.losses.items():
            total, count = sums.get(key, (0.0, 0))
            sums[key] = total + value, count + 1
        self._num_steps += 1
        self._num_tokens += result.num_tokens
        if run.config.logging.log_throughput:
            sizes = (run.config_of_work, result.batch_size, run.padded_vocab_size)
            self._flops += num_floating_point_operations(*sizes)
            self._causal_flops += causal_model_flops(*sizes).total

    def fields(
        self, run: TrainingRun, elapsed_s: float, joules: float | None, peak: float | None
    ) -> dict[str, float]:
        """Return label -> value, in the order of the console line.

        ``elapsed_s`` is the time of all steps, ``joules`` the energy of all ranks, ``peak`` the
        FLOP/s of a device.  Losses are
        means over the steps with an update, or over the skipped steps if there is no other.
        """
        last = self._last
        assert last is not None, "an interval has at least one step"
        device_s = elapsed_s * run.config.world_size
        has_rates = run.config.logging.log_throughput
        losses = self._losses[self._num_steps == self._num_skipped]
        values: dict[str, float | None] = {
            "consumed samples": run.state.consumed_train_samples,
            "skipped samples": run.state.skipped_train_samples or None,
            "elapsed time per iteration (ms)": elapsed_s * 1000.0 / self._num_steps,
            "throughput per GPU (TFLOP/s/GPU)": (
                self._flops / (device_s * 1e12) if has_rates else None
            ),
            "energy per GPU (J/iter/GPU)": (
                None if joules is None else joules / self._num_steps / run.config.world_size
            ),
            "power per GPU (W/GPU)": None if joules is None else joules / device_s,
            "learning rate": last.learning_rate,
            "decoupled learning rate": last.decoupled_learning_rate,
            "global batch size": last.batch_size,
            **{key: float(total) / count for key, (total, count) in losses.items()},
            "loss scale": last.loss_scale,
            "grad norm": None if last.grad_norm is None else float(last.grad_norm),
            "num zeros": None if last.num_zeros is None else float(last.num_zeros),
            "params norm": last.params_norm,
            "number of skipped iterations": self._num_skipped,
            "number of nan iterations": self._num_nan,
            "tokens/s": self._num_tokens / elapsed_s if has_rates else None,
            "MFU": (None if peak is None else 100.0 * self._causal_flops / (device_s * peak)),
        }
        return {label: value for label, value in values.items() if value is not None}
