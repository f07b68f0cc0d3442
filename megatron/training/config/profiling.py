"""Profilers and memory history."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config.option import option


@dataclass(frozen=True, kw_only=True)
class ProfilingConfig:
    """Profilers and memory history."""

    profile: bool = option(False, "", group="training")
    profile_step_start: int = option(10, "", group="training")
    profile_step_end: int = option(12, "", group="training")
    use_pytorch_profiler: bool = option(False, "", group="training")
    profile_ranks: tuple[int, ...] = option((0,), "", group="training", nargs="+")
    record_memory_history: bool = option(False, "", group="training")
    memory_snapshot_path: str = option("snapshot.pickle", "", group="training")
