"""Straggler detection: measure the time that this rank spends in the sections of a step.

The sections are the forward passes of the model, reading data, forward and backward passes together
(both lie inside them), and the optimizer.

The time in which the host waits for other ranks is subtracted; otherwise every rank would show the
time of the slowest one.  On a GPU the times are those of the device's events, which include the
collectives of the pass.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

from megatron.core import device
from megatron.core.diagnostics import collective_tracer
from megatron.core.parallel.collectives import values_of_ranks
from megatron.core.rank_local import each_rank_owns

_log = logging.getLogger(__name__)


@dataclass
class Stopwatch:
    """Stopwatch for named sections; measures only while ``is_on``."""

    is_on: bool = False
    rank: int = 0  # of `StragglerDetector.configure`
    world_size: int = 0
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
    """Context that scripts put around the model, and as ``stimer(bdata=True)`` around data.

    All objects share one stopwatch, as Megatron Core's detector is one object.
    """

    def __init__(self, bdata: bool = False) -> None:
        self._is_data = bdata

    @property
    def enabled(self) -> bool:
        """Whether sections are measured."""
        return stopwatch.is_on

    @property
    def configured(self) -> bool:
        """Whether `configure` has been called."""
        return stopwatch.world_size > 0

    @property
    def my_rank(self) -> int:
        """The rank that `configure` was given."""
        return stopwatch.rank

    @property
    def world_size(self) -> int:
        """The number of ranks that `configure` was given."""
        return stopwatch.world_size

    def configure(
        self,
        world: int,
        rank: int,
        mmcnt: int = 1,
        amp: float = 3.0,
        port: int = 65535,
        prefill: int = 1024,
        enabled: bool = False,
    ) -> None:
        """Set this rank and whether sections are measured; the other arguments have no effect."""
        stopwatch.world_size = world
        stopwatch.rank = rank
        stopwatch.is_on = enabled

    def reset(self) -> None:
        """Drop the times that were measured."""
        stopwatch.lap_s()

    def start_method(self) -> None:
        """Begin a section."""
        stopwatch.begin()

    def stop_method(self) -> None:
        """End the section that began last."""
        stopwatch.end(DATA if self._is_data else MODEL)

    def null_method(self) -> None:
        """Do nothing."""

    def elapsed(self) -> tuple[float, float, int, int, int, int]:
        """Return milliseconds of the model and of data since the last call.

        The last four, temperature, power, utilization and clock of the device, are not measured: 0.
        """
        seconds = stopwatch.lap_s()
        return seconds.get(MODEL, 0.0) * 1e3, seconds.get(DATA, 0.0) * 1e3, 0, 0, 0, 0

    def report(self, total_flops: float = 0.0, log_interval: int = 0) -> bool:
        """Log the fastest and the slowest rank since the last call; return whether it measures.

        ``total_flops``: of all ranks in ``log_interval`` steps.  Collective over all ranks.
        """
        if not stopwatch.is_on:
            return False
        model_ms, data_ms, *_ = self.elapsed()
        steps = max(log_interval, 1)
        ranks = values_of_ranks([model_ms / steps, data_ms / steps])
        order = sorted(range(len(ranks)), key=lambda rank: ranks[rank])
        if stopwatch.rank == 0:
            for name, rank in (("fastest", order[0]), ("slowest", order[-1])):
                model_ms, data_ms = ranks[rank]
                tflops = total_flops / len(ranks) / steps / max(model_ms, 1e-9) / 1e9
                _log.info(
                    f"{name} rank {rank}: model {model_ms:.2f} ms, data {data_ms:.2f} ms, "
                    f"{tflops:.2f} TFLOP/s"
                )
        return True

    def __call__(self, bdata: bool = False) -> StragglerDetector:
        """Return a context for reading data (``bdata``) or for running the model."""
        return StragglerDetector(bdata)

    def __enter__(self) -> StragglerDetector:
        self.start_method()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop_method()
