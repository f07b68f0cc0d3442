"""Straggler detection: measure the time that this rank spends in forward passes and reading data.

The time in which the host waits for other ranks is subtracted; otherwise every rank would show the
time of the slowest one.  On a GPU the times are those of the device's events, which include the
collectives of the pass.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from megatron.core import device
from megatron.core.diagnostics import collective_tracer
from megatron.core.rank_local import each_rank_owns


@dataclass
class Stopwatch:
    """Stopwatch for sections of two kinds, model and data; measures only while ``is_on``."""

    is_on: bool = False
    _open: list[tuple[device.Moment, float] | None] = field(default_factory=list)
    _done: list[tuple[bool, device.Moment, device.Moment, float]] = field(default_factory=list)

    def begin(self) -> None:
        """Begin a section; sections may be nested."""
        now = (device.moment(), collective_tracer.record.waited_s) if self.is_on else None
        self._open.append(now)

    def end(self, is_data: bool) -> None:
        """End the innermost section; ``is_data``: it reads data, else it runs the model."""
        begun = self._open.pop()
        if begun is not None:
            waited_s = collective_tracer.record.waited_s - begun[1]
            self._done.append((is_data, begun[0], device.moment(), waited_s))

    def lap_s(self) -> tuple[float, float]:
        """Return the seconds (model, data) of the sections since the last call.

        Blocks until the device has finished them.
        """
        seconds = [0.0, 0.0]
        for is_data, begin, end, waited_s in self._done:
            seconds[is_data] += device.seconds_between(begin, end) - waited_s
        self._done.clear()
        return seconds[0], seconds[1]


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
        stopwatch.end(self._is_data)
