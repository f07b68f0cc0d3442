"""How long a rank works itself: in the model's forward passes and in reading data.

Time in which it waits for other ranks is left out, else the slow rank would be the one that looks
fast.  On a GPU the device's own clock is read; there the time inside its collectives counts.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from megatron.core import device
from megatron.core.diagnostics import collective_tracer
from megatron.core.rank_local import each_rank_owns


@dataclass
class Stopwatch:
    """Sections of two kinds, measured while ``is_on``."""

    is_on: bool = False
    _open: list[tuple[device.Moment, float] | None] = field(default_factory=list)
    _done: list[tuple[bool, device.Moment, device.Moment, float]] = field(default_factory=list)

    def begin(self) -> None:
        """A section begins, perhaps inside another one."""
        now = (device.moment(), collective_tracer.record.waited_s) if self.is_on else None
        self._open.append(now)

    def end(self, is_data: bool) -> None:
        """The newest section ends."""
        begun = self._open.pop()
        if begun is not None:
            waited_s = collective_tracer.record.waited_s - begun[1]
            self._done.append((is_data, begun[0], device.moment(), waited_s))

    def lap_s(self) -> tuple[float, float]:
        """Seconds since the last lap in the model and in reading data.  Waits for the device."""
        seconds = [0.0, 0.0]
        for is_data, begin, end, waited_s in self._done:
            seconds[is_data] += device.seconds_between(begin, end) - waited_s
        self._done.clear()
        return seconds[0], seconds[1]


stopwatch = Stopwatch()
each_rank_owns(__name__, "stopwatch")


class StragglerDetector(AbstractContextManager["StragglerDetector"]):
    """The context that scripts put around the model, and as ``stimer(bdata=True)`` around data."""

    def __init__(self, bdata: bool = False) -> None:
        self._is_data = bdata

    @property
    def enabled(self) -> bool:
        """Whether anything is measured."""
        return stopwatch.is_on

    def __call__(self, bdata: bool = False) -> StragglerDetector:
        """A context around reading data (``bdata``) or computing."""
        return StragglerDetector(bdata)

    def __enter__(self) -> StragglerDetector:
        stopwatch.begin()
        return self

    def __exit__(self, *error: object) -> None:
        stopwatch.end(self._is_data)
