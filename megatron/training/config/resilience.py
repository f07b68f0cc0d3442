"""Faults: detection, re-runs, restarts."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config.option import option


@dataclass(frozen=True, kw_only=True)
class ResilienceConfig:
    """Faults: detection, re-runs, restarts."""

    check_for_spiky_loss: bool = option(False, "", group="training")
    result_rejected_tracker_filename: str | None = option(None, "", group="training")
    adlr_autoresume: bool = option(False, "", group="autoresume")
    adlr_autoresume_interval: int = option(1000, "", group="autoresume")
    log_straggler: bool = option(False, "", group="straggler")
    disable_straggler_on_startup: bool = option(False, "", group="straggler")
    straggler_ctrlr_port: int = option(65535, "", group="straggler")
    straggler_minmax_count: int = option(1, "", group="straggler")
    run_workload_inspector_server: bool = option(False, "", group="workload inspector")
    inprocess_restart: bool = option(False, "", group="In-process restart")
    inprocess_max_iterations: int | None = option(None, "", group="In-process restart")
    inprocess_monitor_thread_interval: float = option(1.0, "", group="In-process restart")
    inprocess_monitor_process_interval: float = option(1.0, "", group="In-process restart")
    inprocess_progress_watchdog_interval: float = option(1.0, "", group="In-process restart")
    inprocess_heartbeat_interval: float = option(30.0, "", group="In-process restart")
    inprocess_soft_timeout: float = option(60.0, "", group="In-process restart")
    inprocess_hard_timeout: float = option(90.0, "", group="In-process restart")
    inprocess_heartbeat_timeout: float = option(60.0, "", group="In-process restart")
    inprocess_barrier_timeout: float = option(120.0, "", group="In-process restart")
    inprocess_completion_timeout: float = option(120.0, "", group="In-process restart")
    inprocess_last_call_wait: float = option(1.0, "", group="In-process restart")
    inprocess_termination_grace_time: float = option(1.0, "", group="In-process restart")
    inprocess_granularity: str = option(
        "node",
        "",
        group="In-process restart",
        choices=("node", "rank"),
    )
    inprocess_active_world_size: int = option(1, "", group="In-process restart")
    inprocess_empty_cuda_cache: bool = option(False, "", group="In-process restart")
    enable_ft_package: bool = option(False, "", group="ft_package")
    calc_ft_timeouts: bool = option(False, "", group="ft_package")
    error_injection_rate: int = option(0, "", group="rerun engine")
    error_injection_type: str = option(
        "transient_error",
        "",
        group="rerun engine",
        choices=("correct_result", "transient_error", "persistent_error"),
    )
    rerun_mode: str = option(
        "validate_results",
        "",
        group="rerun engine",
        choices=("disabled", "validate_results", "report_stats"),
    )
