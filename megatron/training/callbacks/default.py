"""Create the callbacks of a run in their order; comments explain the order."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial

import torch.distributed as dist

from megatron.core import device
from megatron.core.diagnostics.energy import EnergyMonitor
from megatron.core.optional import available
from megatron.training.arguments.flat_values import flat_values
from megatron.training.callbacks.metrics import Metrics
from megatron.training.callbacks.periodic import (
    CheckpointCallback,
    EvaluationCallback,
    ExitConditions,
    ManualGC,
    Sections,
    TrainSync,
)
from megatron.training.callbacks.profiler import MemoryHistory, NsysRange, TorchProfiler
from megatron.training.callbacks.progress_log import ProgressLog
from megatron.training.callbacks.sinks import (
    ConsoleSink,
    MetricsFileSink,
    ShortSink,
    Sink,
    TensorBoardSink,
    open_sink,
)
from megatron.training.callbacks.straggler import Straggler
from megatron.training.callbacks.trackers import TRACKERS, TrackerSink
from megatron.training.callbacks.user import user_callbacks
from megatron.training.fault_tolerance import sections
from megatron.training.models.registry import registered
from megatron.training.process.rank_print import is_short
from megatron.training.process.signals import catch_stop_signal
from megatron.training.step.run import Callback, CallbackList, ModelRun

logger = logging.getLogger(__name__)


def default_callbacks(run: ModelRun) -> CallbackList:
    """Return all callbacks that the configuration requests; call after loading."""
    return CallbackList(_in_order(run))


def _in_order(run: ModelRun) -> Iterator[Callback]:
    config = run.config
    if sections.monitor.is_on:
        yield Sections()  # first: a step ends before what follows it
    # Before the callbacks below, whose work a profile excludes.
    profiling, rank = config.profiling, dist.get_rank()
    if profiling.profile and rank in profiling.profile_ranks:
        yield TorchProfiler(rank) if profiling.use_pytorch_profiler else NsysRange()
    if profiling.record_memory_history and device.is_cuda():
        yield MemoryHistory()
    if config.training.train_sync_interval:
        yield TrainSync(config.training.train_sync_interval)
    yield Metrics(_sinks(run), energy_monitor() if config.logging.log_energy else None)
    if config.resilience.log_straggler:
        asked = config.resilience
        yield Straggler(
            not asked.disable_straggler_on_startup,
            (asked.straggler_ctrlr_address, asked.straggler_ctrlr_port),
            asked.straggler_minmax_count,
        )
    yield EvaluationCallback()
    if config.validation.eval_generate is not None:
        yield registered("eval_generate")()
    if config.training.manual_gc:
        yield ManualGC()
    if config.logging.log_progress and config.checkpoint.save and run.is_rank_0:
        yield ProgressLog(config.checkpoint.save, config.world_size)
    yield CheckpointCallback()
    # after the regular save, so that an exit does not save the same step twice
    yield ExitConditions(catch_stop_signal() if config.training.exit_signal_handler else None)
    yield from user_callbacks(config.extensions.callback)


def energy_monitor() -> EnergyMonitor | None:
    """Return the monitor of this rank's GPU; without a GPU or NVML warn and return None."""
    if not device.is_cuda():
        logger.warning("--log-energy is without effect: the CPU has no energy counter to read")
    elif not available("pynvml"):
        logger.warning("--log-energy is without effect: pip install nvidia-ml-py")
    else:
        monitor = EnergyMonitor()
        monitor.setup()
        return monitor
    return None


def _sinks(run: ModelRun) -> list[Sink]:
    """Return the sinks of this rank: all that are configured on the last rank, none on others."""
    sinks: list[Sink] = []
    if not run.is_last_loss_rank:
        return sinks
    config, state = run.config, run.state
    arguments = flat_values(config)
    sinks.append(ShortSink(config.data.seq_length) if is_short() else ConsoleSink())
    if (path := config.logging.metrics_file) is not None:
        open_sink(sinks, f"metrics file {path}", lambda: MetricsFileSink(path, state.iteration))
    if config.logging.tensorboard_dir is not None:
        open_sink(
            sinks,
            f"TensorBoard log {config.logging.tensorboard_dir}",
            lambda: TensorBoardSink(config.logging, arguments, state.iteration),
        )
    wandb = ["wandb"] if config.logging.wandb_project else []
    for name in dict.fromkeys([*wandb, *config.logging.tracker]):
        make = partial(TrackerSink, name, run, arguments)
        open_sink(sinks, f"the log in {TRACKERS[name][1].title}", make)
    return sinks
