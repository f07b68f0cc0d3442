"""Values of the --inprocess flags for one start of a run."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.training.config.resilience import ResilienceConfig
from megatron.training.fault_tolerance.inprocess.coordinator import Policy


@dataclass(frozen=True)
class RestartOptions:
    """The flags, the number of workers, and the timeout of collectives in seconds."""

    flags: ResilienceConfig
    world_size: int
    timeout_s: float

    @property
    def active(self) -> int:
        """Number of ranks that train."""
        return self.flags.inprocess_active_world_size

    @property
    def policy(self) -> Policy:
        """Sizes and times of the coordinator."""
        flags = self.flags
        return Policy(
            active=self.active,
            granularity=flags.inprocess_granularity,
            max_attempts=flags.inprocess_max_iterations,
            barrier_s=flags.inprocess_barrier_timeout,
            completion_s=flags.inprocess_completion_timeout,
            last_call_s=flags.inprocess_last_call_wait,
        )
