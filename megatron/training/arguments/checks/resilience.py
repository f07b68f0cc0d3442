"""Checks of the flags for faults and restarts."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.training.config.run import RunConfig

_BELOW = (  # flag -> the flag whose value must be larger
    ("inprocess_soft_timeout", "inprocess_hard_timeout"),
    ("inprocess_hard_timeout", "inprocess_barrier_timeout"),
    ("inprocess_progress_watchdog_interval", "inprocess_soft_timeout"),
    ("inprocess_monitor_thread_interval", "inprocess_soft_timeout"),
    ("inprocess_monitor_process_interval", "inprocess_soft_timeout"),
    ("inprocess_heartbeat_interval", "inprocess_heartbeat_timeout"),
)


def restarts_have_processes_and_times(run: RunConfig) -> Iterator[str]:
    """Require real processes for --inprocess-restart, and timeouts in their order."""
    flags = vars(run.resilience)
    if not run.resilience.inprocess_restart:
        return
    if run.distributed.virtual_ranks is not None:
        yield (
            "--inprocess-restart needs one process per rank: use torchrun instead of "
            f"--virtual-ranks {run.distributed.virtual_ranks}"
        )
    if run.resilience.enable_ft_package:
        yield (
            "--inprocess-restart with --enable-ft-package: both look for hanging ranks and act on "
            "them: omit one of the two"
        )
    for low, high in _BELOW:
        if not flags[low] < flags[high]:
            yield f"{_spelt(low)} {flags[low]} must be less than {_spelt(high)} {flags[high]}"
    for name in dict.fromkeys(low for low, _ in _BELOW):
        if flags[name] == 0:
            yield f"{_spelt(name)} 0: a time above 0 is needed"


def _spelt(name: str) -> str:
    return "--" + name.replace("_", "-")
