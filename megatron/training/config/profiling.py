"""Profilers and memory history."""

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
    profile_step_end: int = _training(12, "Step before which profiling ends.")
    use_pytorch_profiler: bool = _training(
        False,
        "Write a trace of PyTorch's profiler for TensorBoard instead of marking ranges for Nsight.",
    )
    profile_ranks: tuple[int, ...] = _training((0,), "World ranks that are profiled.", nargs="+")
    record_memory_history: bool = _training(
        False,
        "Record every allocation on the GPU.  The last rank writes --memory-snapshot-path at each "
        "--log-interval, and each rank writes oom_rank-RANK_FILE beside it when memory runs out.",
    )
    memory_snapshot_path: str = _training(
        "snapshot.pickle", "File for the history of GPU memory, for pytorch.org/memory_viz."
    )
