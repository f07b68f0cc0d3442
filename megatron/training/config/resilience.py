"""Faults: detection, re-runs, restarts."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config import states
from megatron.core.config.option import option


@dataclass(frozen=True, kw_only=True)
class ResilienceConfig:
    """Faults: detection, re-runs, restarts."""

    check_for_spiky_loss: bool = option(
        False,
        "Stop when the loss jumps far above what was seen before.",
        group="training",
        refused=states.RERUN,
    )
    result_rejected_tracker_filename: str | None = option(
        None,
        "File of steps whose result was rejected before, which are skipped.",
        group="training",
        refused=states.RERUN,
    )
    adlr_autoresume: bool = option(
        False,
        "Let a service of NVIDIA's clusters end and resubmit the job.",
        group="autoresume",
        refused="that service is NVIDIA's own; use --exit-signal-handler or "
        "--exit-duration-in-mins",
    )
    adlr_autoresume_interval: int = option(
        1000,
        "Steps between questions to the resubmission service.",
        group="autoresume",
        ignored=states.only_with("--adlr-autoresume"),
    )
    log_straggler: bool = option(
        False,
        "Compare the speed of ranks and name slow ones.",
        group="straggler",
    )
    disable_straggler_on_startup: bool = option(
        False,
        "Start with straggler detection off.",
        group="straggler",
    )
    straggler_ctrlr_port: int = option(
        65535,
        "Port that switches straggler detection on and off.",
        group="straggler",
    )
    straggler_minmax_count: int = option(
        1,
        "Fastest and slowest ranks that are named.",
        group="straggler",
    )
    run_workload_inspector_server: bool = option(
        False,
        "Serve live profiling on demand.",
        group="workload inspector",
        refused="the workload inspector is NVIDIA's own; use --profile",
    )
    inprocess_restart: bool = option(
        False,
        "Restart training inside the process after a fault.",
        group="In-process restart",
        refused=states.RESTART,
    )
    inprocess_max_iterations: int | None = option(
        None,
        "Restarts that are tried.",
        group="In-process restart",
        ignored=states.only_with("--inprocess-restart"),
    )
    inprocess_monitor_thread_interval: float = option(
        1.0,
        "Seconds between looks of the monitoring thread.",
        group="In-process restart",
        ignored=states.only_with("--inprocess-restart"),
    )
    inprocess_monitor_process_interval: float = option(
        1.0,
        "Seconds between looks of the monitoring process.",
        group="In-process restart",
        ignored=states.only_with("--inprocess-restart"),
    )
    inprocess_progress_watchdog_interval: float = option(
        1.0,
        "Seconds between automatic signs of progress.",
        group="In-process restart",
        ignored=states.only_with("--inprocess-restart"),
    )
    inprocess_heartbeat_interval: float = option(
        30.0,
        "Seconds between heartbeats.",
        group="In-process restart",
        ignored=states.only_with("--inprocess-restart"),
    )
    inprocess_soft_timeout: float = option(
        60.0,
        "Seconds without progress after which a restart is asked for.",
        group="In-process restart",
        ignored=states.only_with("--inprocess-restart"),
    )
    inprocess_hard_timeout: float = option(
        90.0,
        "Seconds without progress after which a rank is killed.",
        group="In-process restart",
        ignored=states.only_with("--inprocess-restart"),
    )
    inprocess_heartbeat_timeout: float = option(
        60.0,
        "Seconds without heartbeat after which a rank counts as lost.",
        group="In-process restart",
        ignored=states.only_with("--inprocess-restart"),
    )
    inprocess_barrier_timeout: float = option(
        120.0,
        "Seconds that ranks wait for each other in a restart.",
        group="In-process restart",
        ignored=states.only_with("--inprocess-restart"),
    )
    inprocess_completion_timeout: float = option(
        120.0,
        "Seconds that ranks wait for each other at the end.",
        group="In-process restart",
        ignored=states.only_with("--inprocess-restart"),
    )
    inprocess_last_call_wait: float = option(
        1.0,
        "Seconds between a fault and the restart, for others to report.",
        group="In-process restart",
        ignored=states.only_with("--inprocess-restart"),
    )
    inprocess_termination_grace_time: float = option(
        1.0,
        "Seconds between the two signals that end a rank.",
        group="In-process restart",
        ignored=states.only_with("--inprocess-restart"),
    )
    inprocess_granularity: str = option(
        "node",
        "What leaves after a fault: a rank or its node.",
        group="In-process restart",
        choices=("node", "rank"),
        ignored=states.only_with("--inprocess-restart"),
    )
    inprocess_active_world_size: int = option(
        1,
        "Ranks that train; the others wait in reserve.",
        group="In-process restart",
        ignored=states.only_with("--inprocess-restart"),
    )
    inprocess_empty_cuda_cache: bool = option(
        False,
        "Return cached GPU memory before a restart.",
        group="In-process restart",
        ignored=states.only_with("--inprocess-restart"),
    )
    enable_ft_package: bool = option(
        False,
        "Send heartbeats to the launcher of the fault-tolerance package.",
        group="ft_package",
        refused=states.FT_PACKAGE,
    )
    calc_ft_timeouts: bool = option(
        False,
        "Learn the timeouts of the fault-tolerance package.",
        group="ft_package",
        ignored=states.only_with("--enable-ft-package"),
    )
    error_injection_rate: int = option(
        0,
        "Steps between made-up faults; 0 means none.",
        group="rerun engine",
        refused=states.RERUN,
    )
    error_injection_type: str = option(
        "transient_error",
        "Kind of made-up fault.",
        group="rerun engine",
        choices=("correct_result", "transient_error", "persistent_error"),
        ignored=states.only_with("--error-injection-rate"),
    )
    rerun_mode: str = option(
        "validate_results",
        "What the reference does about a suspicious step; a NaN loss or gradient always "
        "stops the run here.",
        group="rerun engine",
        choices=("disabled", "validate_results", "report_stats"),
        refused_values={"report_stats": states.RERUN},
        ignored="no step is ever run again here",
    )
