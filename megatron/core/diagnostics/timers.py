"""Named timers, compared over ranks.

A timer has a level from 0 to 2, and measures only if --timing-log-level is at least this level; a
timer above it costs nothing.  ``start`` and ``stop`` synchronize with the device.

The total of a timer never decreases.  Each reader (console, TensorBoard) has a mark of its own in
every timer and reads the time since that mark, so that readers do not affect each other.

Collective: methods that compare ranks (`Timers.log`, `write`, `get_all_timers_string`, `times_s`)
gather once over all ranks; every rank must call them with the same names.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron.core import device
from megatron.core.parallel.collectives import values_of_ranks, wait_for_ranks

MAX_LOG_LEVEL = 2
CONSOLE = "console"
TENSORBOARD = "tensorboard"
_NAME_WIDTH = 48


class Timer:
    """Timer with one mark per reader.

    ``barrier=True`` in a method synchronizes the ranks before the clock is read.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._total_s = 0.0
        self._started_at_s: float | None = None
        self._marks_s: dict[str, float] = {}  # reader -> total at its last reset
        self._barrier_group: ProcessGroup | None = None

    @property
    def is_running(self) -> bool:
        """Whether the timer is started and not stopped."""
        return self._started_at_s is not None

    def set_barrier_group(self, barrier_group: ProcessGroup) -> None:
        """Set the group that ``barrier=True`` synchronizes; the default is the world."""
        self._barrier_group = barrier_group

    def start(self, barrier: bool = False) -> None:
        """Start measuring, after synchronizing with the device."""
        assert not self.is_running, f"timer {self.name} is started twice"
        self._wait(barrier)
        self._started_at_s = time.perf_counter()

    def stop(self, barrier: bool = False) -> None:
        """Stop measuring, after synchronizing with the device."""
        assert self._started_at_s is not None, f"timer {self.name} is stopped but not started"
        self._wait(barrier)
        self._total_s += time.perf_counter() - self._started_at_s
        self._started_at_s = None

    def reset(self) -> None:
        """Set the console's mark to the current total."""
        self._marks_s[CONSOLE] = self.active_time()

    def elapsed(self, reset: bool = True, barrier: bool = False, reader: str = CONSOLE) -> float:
        """Return the seconds since the mark of ``reader``; ``reset``: move the mark.

        A running timer continues.
        """
        if self.is_running:
            self._wait(barrier)
        total_s = self.active_time()
        elapsed_s = total_s - self._marks_s.get(reader, 0.0)
        if reset:
            self._marks_s[reader] = total_s
        return elapsed_s

    def active_time(self) -> float:
        """Return the total seconds since the timer was created."""
        if self._started_at_s is None:
            return self._total_s
        return self._total_s + time.perf_counter() - self._started_at_s

    def _wait(self, barrier: bool) -> None:
        if barrier and dist.is_initialized() and dist.get_world_size(self._barrier_group) > 1:
            wait_for_ranks(self._barrier_group)
        device.synchronize()


class DummyTimer(Timer):
    """Timer above --timing-log-level: measures nothing."""

    def start(self, barrier: bool = False) -> None:
        return

    stop = start

    def active_time(self) -> float:
        raise AssertionError("a timer above --timing-log-level measures nothing")

    def reset(self) -> None:
        return


class Timers:
    """Collection of this process's timers: ``timers("forward", log_level=1).start()``.

    `log` prints nothing unless ``prints``.
    """

    def __init__(self, log_level: int, log_option: str, prints: bool = True) -> None:
        self._prints = prints
        assert log_option in ("max", "minmax", "all"), f"unknown timing log option {log_option!r}"
        self._log_level = log_level
        self._log_option = log_option
        self._timers: dict[str, Timer] = {}
        self._levels: dict[str, int] = {}
        self._dummy = DummyTimer("dummy timer")

    def __call__(self, name: str, log_level: int | None = None) -> Timer:
        """Return the timer ``name``; the first call sets its level (default 2)."""
        if name not in self._levels:
            level = MAX_LOG_LEVEL if log_level is None else log_level
            assert 0 <= level <= MAX_LOG_LEVEL, f"timer {name}: level {level} is not in 0..2"
            self._levels[name] = level
            if level <= self._log_level:
                self._timers[name] = Timer(name)
        known = self._levels[name]
        assert log_level in (None, known), f"timer {name}: level is {known}, not {log_level}"
        return self._timers.get(name, self._dummy)

    def times_s(
        self,
        names: Sequence[str] | None = None,
        *,
        reset: bool = True,
        barrier: bool = False,
        reader: str = CONSOLE,
    ) -> dict[str, list[float]]:
        """Return for each timer the seconds of all ranks since the mark of ``reader``.

        0.0 for a rank that does not have the timer.  Collective over all ranks.
        """
        names = list(self._timers) if names is None else list(names)
        if barrier and _world_size() > 1:
            wait_for_ranks()
        mine = [
            self._timers[name].elapsed(reset=reset, reader=reader) if name in self._timers else 0.0
            for name in names
        ]
        if not names:
            return {}
        columns = zip(*values_of_ranks(mine), strict=True)
        return {name: list(times) for name, times in zip(names, columns, strict=True)}

    def get_all_timers_string(
        self,
        names: Sequence[str] | None = None,
        normalizer: float = 1.0,
        reset: bool = True,
        barrier: bool = False,
    ) -> str | None:
        """Return the text for the console, or None if nothing was measured.  Collective."""
        assert normalizer > 0, f"normalizer is {normalizer}, must be positive"
        times_s = self.times_s(names, reset=reset, barrier=barrier)
        return format_times(times_s, self._log_option, normalizer)

    def log(
        self,
        names: Sequence[str] | None = None,
        rank: int | None = None,
        normalizer: float = 1.0,
        reset: bool = True,
        barrier: bool = False,
    ) -> None:
        """Print the text on ``rank``, by default the last one.  Collective."""
        text = self.get_all_timers_string(names, normalizer, reset, barrier)
        printing_rank = _world_size() - 1 if rank is None else rank
        mine = dist.get_rank() if dist.is_initialized() else 0
        if self._prints and text is not None and mine == printing_rank:
            print(text, flush=True)

    def write(
        self,
        names: Sequence[str],
        writer: Any,
        iteration: int,
        normalizer: float = 1.0,
        reset: bool = True,
        barrier: bool = False,
    ) -> None:
        """Write the largest time over ranks as scalars ``{name}-time``, in seconds.  Collective.

        ``writer``: TensorBoard's SummaryWriter, None on ranks that do not write.  Does not move the
        console's marks.
        """
        assert normalizer > 0, f"normalizer is {normalizer}, must be positive"
        times_s = self.times_s(names, reset=reset, barrier=barrier, reader=TENSORBOARD)
        if writer is not None:
            for name, value_s in largest_s(times_s).items():
                writer.add_scalar(f"{name}-time", value_s / normalizer, iteration)


@contextmanager
def timed(
    timers: Timers | None, name: str, *, log_level: int, barrier: bool = False
) -> Iterator[None]:
    """Measure the context with timer ``name``, unless ``timers`` is None.

    ``barrier``: synchronize the ranks at the start (see `Timer`).
    """
    if timers is None:
        yield
        return
    timer = timers(name, log_level=log_level)
    timer.start(barrier=barrier)
    try:
        yield
    finally:
        timer.stop()


def largest_s(times_s: dict[str, list[float]]) -> dict[str, float]:
    """Return the largest time over ranks of each timer that is not 0 on all ranks."""
    return {name: max(values) for name, values in times_s.items() if max(values) > 0.0}


def format_times(
    times_s: dict[str, list[float]], log_option: str, normalizer: float = 1.0
) -> str | None:
    """Format times in milliseconds, divided by ``normalizer``; return None if all are zero.

    The options minmax and max ignore ranks on which a timer measured nothing.
    """
    ms = {
        name: [value_s * 1000.0 / normalizer for value_s in values]
        for name, values in times_s.items()
        if max(values) > 0.0
    }
    if not ms:
        return None
    if log_option == "all":
        lines = ["times across ranks (ms):"]
        for name, values in ms.items():
            lines.append(f"  {name}:")
            lines += [f"     rank {r:2d}: {v:.2f}" for r, v in enumerate(values) if v > 0.0]
        return "\n".join(lines)
    header = "(min, max) time" if log_option == "minmax" else "max time"
    lines = [f"{header} across ranks (ms):"]
    for name, values in ms.items():
        low, high = min(v for v in values if v > 0.0), max(values)
        text = f"({low:.2f}, {high:.2f})" if log_option == "minmax" else f"{high:.2f}"
        lines.append(f"    {f'{name} '.ljust(_NAME_WIDTH, '.')}: {text}")
    return "\n".join(lines)


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
