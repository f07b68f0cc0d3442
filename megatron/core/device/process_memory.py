"""Memory of this process and of its job, in bytes, as Linux accounts for it."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path


def resident_and_peak() -> tuple[int, int]:
    """Memory that this process has now, and the most it has had."""
    now = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return now, max(now, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 2**10)


def available_to_job() -> int:
    """Physical memory of the host, or what the job's control group allows of it."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *_control_group_limits()])


def _control_group_limits() -> Iterator[int]:
    """Limits of either version of control groups."""
    for path in ("memory.max", "memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
            yield int(Path("/sys/fs/cgroup", path).read_text())
