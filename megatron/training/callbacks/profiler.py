"""Profile some steps (--profile) and write memory snapshots (--record-memory-history).

The profile covers the steps from --profile-step-start + 1 to --profile-step-end, on the ranks of
--profile-ranks.  With --use-pytorch-profiler it is a trace for TensorBoard and chrome://tracing;
otherwise the steps are marked for nsys (``nsys profile --capture-range=cudaProfilerApi``).
"""

from __future__ import annotations

import contextlib
import logging
from functools import partial

from torch.autograd.profiler import emit_nvtx
from torch.profiler import ProfilerActivity, profile, schedule, tensorboard_trace_handler

from megatron.core import device
from megatron.training.config.run import RunConfig
from megatron.training.runtime.context import StepResult
from megatron.training.step.run import Callback, TrainingRun

logger = logging.getLogger(__name__)


class TorchProfiler(Callback):
    """Record a trace with torch.profiler, after one warm-up step."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._profiler: profile | None = None

    def on_step_start(self, run: TrainingRun) -> None:
        first, last = window(run.config)
        done = run.state.iteration
        if self._profiler is None and first - 1 <= done <= first < last:
            activities = [ProfilerActivity.CPU]
            if device.is_cuda():
                activities.append(ProfilerActivity.CUDA)
            folder = run.config.logging.tensorboard_dir
            assert folder is not None, "resolve() has asked for --tensorboard-dir"
            self._profiler = profile(
                activities=activities,
                schedule=schedule(wait=0, warmup=first - done, active=last - first, repeat=1),
                on_trace_ready=partial(_write_trace, folder, f"rank{self._rank}"),
                record_shapes=True,
                with_stack=True,
            )
            self._profiler.start()

    def on_step_end(self, run: TrainingRun, result: StepResult) -> None:
        if self._profiler is not None:
            self._profiler.step()
            if run.state.iteration >= window(run.config)[1]:
                self.close()

    def close(self) -> None:
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None


def _write_trace(folder: str, worker: str, profiler: profile) -> None:
    """Write the trace; on failure warn, and training goes on without it."""
    try:
        tensorboard_trace_handler(folder, worker_name=worker)(profiler)
    except (OSError, RuntimeError) as error:  # RuntimeError: the folder cannot be created
        logger.warning("no profile of %s: %s", worker, error, extra={"all_ranks": True})


class NsysRange(Callback):
    """Mark the profiled steps for an attached nsys, with a range per operation."""

    def __init__(self) -> None:
        self._ranges: contextlib.ExitStack | None = None

    def on_step_start(self, run: TrainingRun) -> None:
        first, last = window(run.config)
        if self._ranges is None and run.state.iteration == first < last:
            self._ranges = contextlib.ExitStack()
            self._ranges.enter_context(device.profiler_range())
            if device.is_cuda():
                self._ranges.enter_context(emit_nvtx(record_shapes=True))

    def on_step_end(self, run: TrainingRun, result: StepResult) -> None:
        if run.state.iteration >= window(run.config)[1]:
            self.close()

    def close(self) -> None:
        if self._ranges is not None:
            self._ranges.close()
            self._ranges = None


class MemoryHistory(Callback):
    """Write a snapshot of all allocations at every --log-interval, on the last rank."""

    def on_train_start(self, run: TrainingRun) -> None:
        self.log_name = f"memory history {run.config.profiling.memory_snapshot_path}"

    def on_step_end(self, run: TrainingRun, result: StepResult) -> None:
        if run.is_last_loss_rank and run.state.iteration % run.config.logging.log_interval == 0:
            device.dump_memory_history(run.config.profiling.memory_snapshot_path)


def window(config: RunConfig) -> tuple[int, int]:
    """Return the numbers of finished steps at which the profile starts and ends."""
    return config.profiling.profile_step_start, config.profiling.profile_step_end
