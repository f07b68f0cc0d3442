"""Memory of this process and its job in bytes, read from Linux's accounting."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path


def resident_and_peak() -> tuple[int, int]:
    """Return the current and the peak resident memory of this process."""
    now = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return now, max(now, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 2**10)


def available_to_job() -> int:
    """Return the physical memory of the host, or the limit of the job's control group if less."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *_control_group_limits()])


def free_for_job() -> int:
    """Return the memory that the job can still allocate, page cache included."""
    free = []
    with contextlib.suppress(OSError, IndexError, ValueError):
        (line,) = (t for t in Path("/proc/meminfo").read_text().splitlines() if "MemAvail" in t)
        free.append(int(line.split()[1]) * 2**10)
    with contextlib.suppress(OSError, ValueError):
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        free.append(limit - int(Path("/sys/fs/cgroup/memory.current").read_text()))
    return min(free, default=available_to_job())


def boot_id() -> str:
    """Return the id of this boot of the kernel, which differs between hosts; empty if unknown."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def _control_group_limits() -> Iterator[int]:
    """Yield the memory limits of control groups, version 2 and version 1."""
    for path in ("memory.max", "memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
            yield int(Path("/sys/fs/cgroup", path).read_text())
