"""NVIDIA's rank monitor and straggler detector (package nvidia-resiliency-ext).

``ft_launcher`` starts the rank monitor, a process beside each rank.  It ends the rank when a
section is open for longer than its limit, and ft_launcher then restarts all ranks.  The detector
compares the times of GPU kernels over all ranks.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import Any

from megatron.core import device
from megatron.core.config.errors import ConfigError
from megatron.core.optional import available, require
from megatron.training.fault_tolerance.limits import LEARNT, OUT_OF_SECTION, Limits

_SOCKET = "FT_RANK_MONITOR_IPC_SOCKET"  # ft_launcher sets it
_FLAG = "--enable-ft-package"
_DETECTOR = "nvidia_resiliency_ext.straggler"
_PROFILED_STEPS = 10  # one of so many: profiling kernels takes time


class RankMonitor:
    """Connection of this rank to its monitor.  Each call is a round trip to it."""

    def __init__(self) -> None:
        """Connect.  Raises MissingDependency, or ConfigError if ft_launcher lacks sections."""
        package: Any = require("nvidia_resiliency_ext.fault_tolerance", _FLAG)
        self.client = package.RankMonitorClient()
        self.client.init_workload_monitoring()
        known = self.client.section_timeouts.section
        if missing := [name for name in LEARNT if name and name not in known]:
            raise ConfigError(
                f"{_FLAG}: ft_launcher knows no section {', '.join(missing)}: start it with "
                "--ft-rank_section_timeouts=setup:1800,step:900,checkpointing:1800 and "
                "--ft-rank_out_of_section_timeout=900 (seconds)"
            )

    @staticmethod
    def is_offered() -> bool:
        """Return whether ft_launcher has started this process."""
        return _SOCKET in os.environ

    def begin(self, section: str) -> None:
        """Open a section."""
        self.client.start_section(section)

    def end(self, section: str) -> None:
        """Close a section."""
        self.client.end_section(section)

    def set_limits(self, limits: Limits) -> None:
        """Replace the limits of the monitor by those that were learnt; the others stay.

        Its limit between heartbeats is removed: sections replace heartbeats.
        """
        timeouts = self.client.section_timeouts
        section: dict[str, Any] = {
            "section": {**timeouts.section, **limits.learnt_s()},
            "calculated_sections": sorted(limits.learnt - {OUT_OF_SECTION}),
            "is_out_of_section_calculated": OUT_OF_SECTION in limits.learnt,
        }
        section["out_of_section"] = section["section"].pop(OUT_OF_SECTION, timeouts.out_of_section)
        state = {"heartbeat": {"initial": None, "subsequent": None}, "section": section}
        self.client.load_state_dict({"current_timeouts": state})

    def close(self) -> None:
        """Stop the monitoring of this rank."""
        self.client.shutdown_workload_monitoring()


class KernelDetector:
    """Find the ranks whose GPU kernels are slower than on other ranks."""

    def __init__(self) -> None:
        """Begin to profile.  Raises MissingDependency."""
        self._detector: Any = require(_DETECTOR, "--log-straggler").Detector
        self._detector.initialize(
            scores_to_compute=["relative_perf_scores"],
            gather_on_rank0=True,
            profiling_interval=_PROFILED_STEPS,
        )

    @staticmethod
    def is_offered() -> bool:
        """Return whether this rank has a GPU, and the package is installed."""
        return device.is_cuda() and available(_DETECTOR)

    def step(self) -> AbstractContextManager[None]:
        """Return a context manager that measures the kernels of one step."""
        section: AbstractContextManager[None] = self._detector.detection_section("step")
        return section

    def slow_ranks(self) -> list[str]:
        """Return a line per slow GPU since the last call, on rank 0.  Collective over all ranks."""
        report = self._detector.generate_report()
        if report is None or not report.gpu_relative_perf_scores:
            return []
        slow = report.identify_stragglers()["straggler_gpus_relative"]
        scores = report.gpu_relative_perf_scores
        return [
            f"slow: the kernels of rank {one.rank} on {one.node} have {scores[one.rank]:.0%} of "
            "the speed of the fastest rank"
            for one in sorted(slow, key=lambda one: one.rank)
        ]

    def close(self) -> None:
        """End the profiling."""
        self._detector.shutdown()
