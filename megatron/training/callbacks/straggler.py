"""Log the slowest and fastest ranks, one line per log interval (--log-straggler).

The line has ``value/rank`` of the minimum (Mn) and maximum (Mx) of each column.  Rtt: milliseconds
per step in the forward passes of the model.  Pwr, Tmp, Utl, Clk: power, temperature, utilization
and clock of the GPU, if NVML reports them.  DRtt: milliseconds per step in reading data.  Etpt:
TFLOP/s of the model in its forward passes.

A rank that spends clearly more time than the others of its pipeline stage in a section (data,
forward and backward passes, optimizer) gets a line of its own, also in the exit report; the time in
which it waits for others is not counted.

An HTTP request to --straggler-ctrlr-port on rank 0 (``curl localhost:port``) switches the report on
or off; all ranks follow at the next log interval.  There is no password: by default only processes
on the host of rank 0 can reach the port (--straggler-ctrlr-address).  Collective over all ranks at
each log interval, whether on or off.
"""

from __future__ import annotations

import logging
import math
import re
import socket
import socketserver
import threading
from collections.abc import Callable, Sequence
from typing import Any

from megatron.core import device
from megatron.core.diagnostics import straggler
from megatron.core.diagnostics.energy import Gpu
from megatron.core.optional import available, require
from megatron.core.parallel.collectives import values_of_ranks
from megatron.training.estimates.flops import FORWARD_AND_BACKWARD, num_floating_point_operations
from megatron.training.process import exit_report
from megatron.training.runtime.context import StepResult
from megatron.training.step.run import Callback, PauseReason, TrainingRun

logger = logging.getLogger(__name__)

# Column, unit, digits.
_COLUMNS = (
    ("Rtt", "ms", 2),
    ("Pwr", "W", 1),
    ("Tmp", "C", 0),
    ("Utl", "%", 0),
    ("Clk", "MHz", 0),
    ("DRtt", "ms", 2),
    ("Etpt", "TF", 4),
)
_SECTIONS = (straggler.PASSES, straggler.OPTIMIZER, straggler.DATA)
# A section is slow if it takes this share of a step longer than on like ranks, and this long.
_OF_A_STEP = 0.05
_AT_LEAST_MS = 5.0
_REQUEST = re.compile(rb"(GET|POST|PUT) \S+ HTTP/1\.[01]\r?\n")
_REQUEST_BYTES = 4096
_REQUEST_S = 2.0
_POLL_S = 0.05


class Straggler(Callback):
    """Measure times on every rank, compare them over all ranks and log the result on rank 0."""

    def __init__(self, is_on: bool, address: tuple[str, int], count: int) -> None:
        """Create the callback.

        ``address`` is (host, port) of the switch; ``count`` is the number of slowest and of fastest
        ranks in the report.
        """
        self._is_on = is_on
        self._address = address
        self._count = count
        self._read_gpu = gpu_reader()
        self._switch: Switch | None = None
        self._steps = 0
        self._flops = 0.0

    def on_train_start(self, run: TrainingRun) -> None:
        if run.is_rank_0:
            try:
                self._switch = Switch(self._is_on, self._address)
            except OSError as error:
                logger.warning(
                    "--straggler-ctrlr-port %d at %s: %s; the report cannot be switched in this "
                    "run",
                    *(self._address[1], self._address[0], error),
                )
        straggler.stopwatch.is_on = self._is_on

    def on_step_end(self, run: TrainingRun, result: StepResult) -> None:
        if not result.skipped:
            self._steps += 1
            self._flops += num_floating_point_operations(
                run.config_of_work, result.batch_size, run.padded_vocab_size
            )
        if run.state.iteration % run.config.logging.log_interval == 0:
            self._compare(run)

    def on_pause(self, run: TrainingRun, reason: PauseReason) -> None:
        straggler.stopwatch.is_on = False

    def on_resume(self, run: TrainingRun, reason: PauseReason) -> None:
        straggler.stopwatch.is_on = self._is_on

    def on_train_end(self, run: TrainingRun) -> None:
        straggler.stopwatch.is_on = False

    def close(self) -> None:
        if self._switch is not None:
            self._switch.close()

    def _compare(self, run: TrainingRun) -> None:
        """Gather the values of all ranks, log them on rank 0 and apply the state of its switch.

        Collective over all ranks.
        """
        world_size = run.config.world_size
        wanted = self._is_on if self._switch is None else self._switch.is_on
        stage = 0 if world_size == 1 else run.groups.pp.rank()
        seconds = straggler.stopwatch.lap_s()
        model_s = seconds[straggler.MODEL]
        data_s = seconds[straggler.DATA]
        seconds[straggler.PASSES] = max(0.0, seconds[straggler.PASSES] - data_s)
        to_ms = 1e3 / max(1, self._steps)
        teraflops = self._flops / FORWARD_AND_BACKWARD / world_size / 1e12
        throughput = teraflops / model_s if model_s > 0 else 0.0
        sections = [stage, *(to_ms * seconds[section] for section in _SECTIONS)]
        columns = [to_ms * model_s, *self._read_gpu(), to_ms * data_s, throughput]
        rows = values_of_ranks([wanted, *sections, *columns])
        if self._is_on and self._steps > 0 and run.is_rank_0:
            split = 1 + len(sections)
            lines = slow_sections([row[1:split] for row in rows])
            exit_report.note(stragglers=lines)
            for line in [*report([row[split:] for row in rows], self._count), *lines]:
                logger.info(line)
        self._is_on = straggler.stopwatch.is_on = bool(rows[0][0])
        self._steps = 0
        self._flops = 0.0


def report(rows: Sequence[Sequence[float]], count: int) -> list[str]:
    """Return the log lines for the rows of all ranks; omit columns that no rank has measured."""
    parts = []
    for index, (name, unit, digits) in enumerate(_COLUMNS):
        by_value = sorted(
            (row[index], rank) for rank, row in enumerate(rows) if not math.isnan(row[index])
        )
        if by_value:
            parts += [
                f"{end}{name}/Rnk: {value:.{digits}f}{unit}/{rank}"
                for end, (value, rank) in (("Mn", by_value[0]), ("Mx", by_value[-1]))
            ]
    lines = [" | ".join(parts)]
    if count > 1:
        ranked = sorted((row[-1], rank) for rank, row in enumerate(rows))
        shown = [f"{value:.4f}TF/{rank}" for value, rank in ranked]
        lines += [
            f"^^^^ Bottom {count} Ranks with lowest  Etpt: {', '.join(shown[:count])}",
            f"^^^^ Top    {count} Ranks with highest Etpt: {', '.join(shown[: -count - 1 : -1])}",
        ]
    return lines


def slow_sections(rows: Sequence[Sequence[float]]) -> list[str]:
    """Return a line for each rank and section that is clearly slower than others.

    ``rows`` has the pipeline stage and milliseconds in each of `_SECTIONS` for each rank.  Ranks
    of one stage do the same work; of two ranks the faster one is the measure.
    """
    lines = []
    for stage in sorted({row[0] for row in rows}):
        alike = [(rank, row[1:]) for rank, row in enumerate(rows) if row[0] == stage]
        step_ms = _median([sum(values) for _, values in alike])
        for index, section in enumerate(_SECTIONS):
            usual_ms = _median([values[index] for _, values in alike])
            lines += [
                f"slow: rank {rank} computes {values[index]:.1f} ms per step in section {section}, "
                f"the median of like ranks is {usual_ms:.1f} ms"
                for rank, values in alike
                if values[index] > usual_ms + max(_AT_LEAST_MS, _OF_A_STEP * step_ms)
            ]
    return lines


def _median(values: Sequence[float]) -> float:
    return sorted(values)[(len(values) - 1) // 2]


class Switch(socketserver.TCPServer):
    """HTTP server whose every request inverts ``is_on``; the response reports the new state.

    It serves one connection at a time, in a thread.  A connection must send its request within
    `_REQUEST_S` seconds, in one segment of at most `_REQUEST_BYTES`; others, such as a port scan,
    are closed and change nothing.
    """

    allow_reuse_address = True

    def __init__(self, is_on: bool, address: tuple[str, int]) -> None:
        """Listen.  Raises OSError."""
        self.is_on = is_on
        super().__init__(address, socketserver.BaseRequestHandler)
        threading.Thread(
            target=self.serve_forever, args=(_POLL_S,), name="straggler switch", daemon=True
        ).start()

    def close(self) -> None:
        """Stop listening."""
        self.shutdown()
        self.server_close()

    def finish_request(self, request: Any, client_address: object) -> None:
        """Answer the request of a connection."""
        connection: socket.socket = request
        connection.settimeout(_REQUEST_S)
        if not _REQUEST.match(connection.recv(_REQUEST_BYTES)):
            return
        self.is_on = not self.is_on
        text = f"straggler report {'on' if self.is_on else 'off'}\n"
        head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(text)}\r\nConnection: close\r\n\r\n"
        connection.sendall(f"{head}{text}".encode())

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore a connection that failed."""


def gpu_reader() -> Callable[[], Sequence[float]]:
    """Return a function that reads power, temperature, utilization and clock of this rank's GPU.

    The values are NaN if there is no GPU or no NVML.
    """
    if not device.is_cuda() or not available("pynvml"):
        return lambda: [math.nan] * 4
    nvml: Any = require("pynvml", "--log-straggler")
    gpu = Gpu(nvml, device.uuid(), "--log-straggler")
    return lambda: [
        gpu.read("PowerUsage") / 1e3,
        gpu.read("Temperature", nvml.NVML_TEMPERATURE_GPU),
        getattr(gpu.read("UtilizationRates"), "gpu", math.nan),  # NaN after a failure
        gpu.read("ClockInfo", nvml.NVML_CLOCK_SM),
    ]
