"""Flags for faults: detection, re-runs, restarts."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from functools import partial

from megatron.core.config.option import option

_STARTED = os.environ.get("WORLD_SIZE", "")
_WORLD_SIZE = int(_STARTED) if _STARTED.isascii() and _STARTED.isdigit() else 1

_check = partial(option, group="training")
_straggler = partial(option, group="straggler")
_restart = partial(option, group="In-process restart")
_ft_package = partial(option, group="ft_package")
_rerun = partial(option, group="rerun engine")


@dataclass(frozen=True, kw_only=True)
class ResilienceConfig:
    check_for_spiky_loss: bool = _check(
        False,
        "Compute a step again if the loss of a micro-batch is 10 times the largest one of the "
        "first 100.",
    )
    result_rejected_tracker_filename: str | None = _check(
        None,
        "Append rejected results to this file, and skip the steps whose result it records as "
        "rejected in every rerun.",
    )
    log_straggler: bool = _straggler(False, "Compare the speed of ranks and log the slowest ones.")
    disable_straggler_on_startup: bool = _straggler(
        False, "Start with straggler detection disabled."
    )
    straggler_ctrlr_port: int = _straggler(
        65535,
        "Port of rank 0 at which an HTTP request switches straggler detection on and off, "
        "without a password.",
        at_least=1,
        at_most=65535,
    )
    straggler_ctrlr_address: str = _straggler(
        "127.0.0.1",
        "Address at which --straggler-ctrlr-port listens; by default only processes of rank 0's "
        "host reach it, 0.0.0.0 listens on all IPv4 networks.",
    )
    straggler_minmax_count: int = _straggler(
        1, "Number of fastest and slowest ranks to log.", at_least=1
    )
    inprocess_restart: bool = _restart(
        False,
        "After a fault of a rank, leave all collectives, replace the rank by a reserve and call "
        "the training function again in the same processes, by NVIDIA's wrapper "
        "(nvidia-resiliency-ext).",
    )
    inprocess_max_iterations: int | None = _restart(
        None, "Maximum number of attempts, the first included; no limit if not given.", at_least=1
    )
    inprocess_monitor_thread_interval: float = _restart(
        1.0, "Seconds between two looks of the monitoring thread for a stop of the attempt."
    )
    inprocess_monitor_process_interval: float = _restart(
        1.0, "Seconds between two looks of the monitor process at its worker."
    )
    inprocess_progress_watchdog_interval: float = _restart(
        1.0, "Seconds between two looks for progress: a collective, or movement of the main thread."
    )
    inprocess_heartbeat_interval: float = _restart(
        30.0, "Seconds between two heartbeats of a monitor process."
    )
    inprocess_soft_timeout: float = _restart(
        60.0, "Seconds without progress of a rank after which the attempt is stopped."
    )
    inprocess_hard_timeout: float = _restart(
        90.0,
        "Seconds without progress of a rank after which its monitor process ends it; more than "
        "--inprocess-soft-timeout.",
    )
    inprocess_heartbeat_timeout: float = _restart(
        60.0, "Seconds without heartbeat of a monitor process after which its rank counts as lost."
    )
    inprocess_barrier_timeout: float = _restart(
        120.0, "Seconds that ranks wait for each other before an attempt; late ranks are excluded."
    )
    inprocess_completion_timeout: float = _restart(
        120.0,
        "Seconds that finished ranks wait for the others; an unfinished rank then has failed.",
    )
    inprocess_last_call_wait: float = _restart(
        1.0,
        "Seconds between a fault and the next attempt, in which other ranks report their faults.",
    )
    inprocess_termination_grace_time: float = _restart(
        1.0, "Seconds between SIGTERM and SIGKILL when a monitor process ends its worker."
    )
    inprocess_granularity: str = _restart(
        "node", "What is excluded after a fault: the rank or its node.", choices=("node", "rank")
    )
    inprocess_active_world_size: int = _restart(
        _WORLD_SIZE,
        "Number of ranks that train; the others wait in reserve.  Default: all started ranks.",
        at_least=1,
    )
    inprocess_empty_cuda_cache: bool = _restart(
        False, "Return cached GPU memory to the device before a restart."
    )
    enable_ft_package: bool = _ft_package(
        False,
        "Find a rank that hangs by time limits of sections (setup, step, checkpointing), and end "
        "the run.  NVIDIA's rank monitor enforces them under ft_launcher, the supervisor under "
        "tools/launch.py; under torchrun they are only learned.",
    )
    calc_ft_timeouts: bool = _ft_package(
        False,
        "Save the limits that were learned in this run in ft_state.json in the folder of --save, "
        "for later runs.",
    )
    error_injection_rate: int = _rerun(
        0,
        "Treat one in this many validated results as unexpected, to test --rerun-mode; 0: none.",
    )
    error_injection_type: str = _rerun(
        "transient_error",
        "Cause that the reruns find for an injected error.",
        choices=("correct_result", "transient_error", "persistent_error"),
    )
    rerun_mode: str = _rerun(
        "validate_results",
        "What follows an unexpected result, such as a NaN loss or gradient: disabled ends the "
        "run; validate_results computes the step again, at once and after a restart, to find the "
        "cause; report_stats computes every step twice and logs how far the results differ.",
        choices=("disabled", "validate_results", "report_stats"),
    )


# Fields that only configure --inprocess-restart.
RESTART_FLAGS = tuple(
    f
    for f in fields(ResilienceConfig)
    if f.name.startswith("inprocess_")
    and f.name not in ("inprocess_restart", "inprocess_active_world_size")  # the launcher's default
)
