"""Flags for profilers and the memory history."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from megatron.core.config.option import option

_training = partial(option, group="training")


@dataclass(frozen=True, kw_only=True)
class ProfilingConfig:
    profile: bool = _training(
        False, "Profile the steps between --profile-step-start and --profile-step-end."
    )
    profile_step_start: int = _training(10, "First step that is profiled.")
    profile_step_end: int = _training(12, "Step at which profiling ends, not profiled itself.")
    use_pytorch_profiler: bool = _training(
        False,
        "Write a PyTorch profiler trace to --tensorboard-dir instead of NVTX ranges for "
        "Nsight Systems.",
    )
    profile_ranks: tuple[int, ...] = _training((0,), "Global ranks to profile.", nargs="+")
    record_memory_history: bool = _training(
        False,
        "Record GPU memory allocations. The last rank writes --memory-snapshot-path at each "
        "--log-interval, and each rank writes oom_rank-RANK_FILE beside it when memory runs "
        "out.",
    )
    memory_snapshot_path: str = _training(
        "snapshot.pickle", "Output file of --record-memory-history, for pytorch.org/memory_viz."
    )
