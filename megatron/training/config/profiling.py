"""Profilers and memory history."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config.option import option


@dataclass(frozen=True, kw_only=True)
class ProfilingConfig:
    """Profilers and memory history."""

    profile: bool = option(
        False,
        "Profile the steps between --profile-step-start and --profile-step-end.",
        group="training",
    )
    profile_step_start: int = option(
        10,
        "First step that is profiled.",
        group="training",
    )
    profile_step_end: int = option(
        12,
        "Step before which profiling ends.",
        group="training",
    )
    use_pytorch_profiler: bool = option(
        False,
        "Write a trace of PyTorch's profiler for TensorBoard instead of marking ranges for Nsight.",
        group="training",
    )
    profile_ranks: tuple[int, ...] = option(
        (0,),
        "World ranks that are profiled.",
        group="training",
        nargs="+",
    )
    record_memory_history: bool = option(
        False,
        "Record every allocation on the GPU and write the history at the end.",
        group="training",
    )
    memory_snapshot_path: str = option(
        "snapshot.pickle",
        "File for the history of GPU memory.",
        group="training",
    )
