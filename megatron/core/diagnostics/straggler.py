"""Straggler detection: measure the time that this rank spends in the sections of a step.

The sections are the forward passes of the model, reading data, forward and backward passes together
(both lie inside them), and the optimizer.

The time in which the host waits for other ranks is subtracted; otherwise every rank would show the
time of the slowest one.  On a GPU the times are those of the device's events, which include the
collectives of the pass.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

from megatron.core import device
from megatron.core.diagnostics import collective_tracer
from megatron.core.rank_local import each_rank_owns


@dataclass
class Stopwatch:
    """Stopwatch for named sections; measures only while ``is_on``."""

    is_on: bool = False
    _open: list[tuple[device.Moment, float] | None] = field(default_factory=list)
    _done: list[tuple[str, device.Moment, device.Moment, float]] = field(default_factory=list)

    def begin(self) -> None:
        """Begin a section; sections may be nested."""
        now = (device.moment(), collective_tracer.record.waited_s) if self.is_on else None
        self._open.append(now)

    def end(self, section: str) -> None:
        """End the innermost section and count its time for ``section``."""
        begun = self._open.pop()
        if begun is not None:
            waited_s = collective_tracer.record.waited_s - begun[1]
            self._done.append((section, begun[0], device.moment(), waited_s))

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Context manager for `begin` and `end`."""
        self.begin()
        try:
            yield
        finally:
            self.end(name)

    def lap_s(self) -> dict[str, float]:
        """Return the seconds of each section since the last call.

        Blocks until the device has finished them.
        """
        seconds: dict[str, float] = defaultdict(float)
        for section, begin, end, waited_s in self._done:
            seconds[section] += device.seconds_between(begin, end) - waited_s
        self._done.clear()
        return seconds


MODEL = "model"
DATA = "data"
PASSES = "forward-backward"
OPTIMIZER = "optimizer"
stopwatch = Stopwatch()
each_rank_owns(__name__, "stopwatch")


class StragglerDetector(AbstractContextManager["StragglerDetector"]):
    """Context that scripts put around the model, and as ``stimer(bdata=True)`` around data."""

    def __init__(self, bdata: bool = False) -> None:
        self._is_data = bdata

    @property
    def enabled(self) -> bool:
        """Whether sections are measured."""
        return stopwatch.is_on

    def __call__(self, bdata: bool = False) -> StragglerDetector:
        """Return a context for reading data (``bdata``) or for running the model."""
        return StragglerDetector(bdata)

    def __enter__(self) -> StragglerDetector:
        stopwatch.begin()
        return self

    def __exit__(self, *error: object) -> None:
        stopwatch.end(DATA if self._is_data else MODEL)
