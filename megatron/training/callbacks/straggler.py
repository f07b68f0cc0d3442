"""Log the slowest and fastest ranks, one line per log interval (--log-straggler).

The line has ``value/rank`` of the minimum (Mn) and maximum (Mx) of each column.  Rtt: milliseconds
per step in the forward passes of the model.  Pwr, Tmp, Utl, Clk: power, temperature, utilization
and clock of the GPU, if NVML reports them.  DRtt: milliseconds per step in reading data.  Etpt:
TFLOP/s of the model in its forward passes.

A rank that spends clearly more time than the others of its pipeline stage in a section (data,
forward and backward passes, optimizer) gets a line of its own, also in the exit report; the time in
which it waits for others is not counted.  On a GPU with nvidia-resiliency-ext its detector adds the
ranks whose kernels are slow.

An HTTP request to --straggler-ctrlr-port on rank 0 (``curl localhost:port``) switches the report on
or off; all ranks follow at the next log interval.  There is no password: by default only processes
on the host of rank 0 can reach the port (--straggler-ctrlr-address).  Collective over all ranks at
each log interval, whether on or off.
"""

from __future__ import annotations

import contextlib
import logging
import math
import re
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from megatron.core import device
from megatron.core.diagnostics import straggler
from megatron.core.optional import available, require
from megatron.training.callbacks.energy import Gpu
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
# NVIDIA's detector, and how often it profiles a step: profiling kernels takes time.
_DETECTOR = "nvidia_resiliency_ext.straggler"
_PROFILED_STEPS = 10
_SECTIONS = (straggler.PASSES, straggler.OPTIMIZER, straggler.DATA)
# A section is slow if it takes this share of a step longer than on like ranks, and this long.
_OF_A_STEP = 0.05
_AT_LEAST_MS = 5.0
_REQUEST = re.compile(rb"(GET|POST|PUT) \S+ HTTP/1\.[01]\r?\n")
_REQUEST_BYTES = 4096
_REQUEST_S = 2.0
_RETRY_S = 0.1
_OF_THE_GPU = ("Pwr", "Tmp", "Utl", "Clk")


class Straggler(Callback):
    """Measure times on every rank, compare them over all ranks and log the result on rank 0."""

    def __init__(self, is_on: bool, address: tuple[str, int], count: int) -> None:
        """Create the callback.

        ``address`` is (host, port) of the switch; ``count`` is the number of slowest and of fastest
        ranks in the report.
        """
        self._is_on, self._address, self._count = is_on, address, count
        self._read_gpu = gpu_reader()
        self._switch: Switch | None = None
        self._steps, self._flops = 0, 0.0
        self._kernels: KernelDetector | None = None
        self._step: AbstractContextManager[None] | None = None

    def on_train_start(self, run: TrainingRun) -> None:
        if KernelDetector.is_offered():
            self._kernels = KernelDetector()
        if run.is_rank_0:
            self._switch = Switch(self._is_on, self._address)
        straggler.stopwatch.is_on = self._is_on

    def on_step_start(self, run: TrainingRun) -> None:
        if self._kernels is not None and self._is_on:
            self._step = self._kernels.step()
            self._step.__enter__()

    def on_step_end(self, run: TrainingRun, result: StepResult) -> None:
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._step = None
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
        if self._kernels is not None:
            self._kernels.close()
        if self._switch is not None:
            self._switch.close()

    def _compare(self, run: TrainingRun) -> None:
        """Gather the values of all ranks, log them on rank 0 and apply the state of its switch.

        Collective over all ranks.
        """
        wanted = self._is_on if self._switch is None else self._switch.is_on
        row, sections_ms = self._row(run.config.world_size)
        stage = 0 if run.config.world_size == 1 else run.groups.pp.rank()
        mine = torch.tensor(
            [float(wanted), float(stage), *sections_ms, *row],
            dtype=torch.float64,
            device=device.current(),
        )
        rows = [torch.empty_like(mine) for _ in range(run.config.world_size)]
        if len(rows) > 1:
            dist.all_gather(rows, mine)
        else:
            rows = [mine]
        is_measured = self._is_on and self._steps > 0
        slow_gpus = self._kernels.slow_ranks() if self._kernels is not None and is_measured else []
        if is_measured and run.is_rank_0:
            values = [row[1:].tolist() for row in rows]
            split = 1 + len(_SECTIONS)
            lines = [*slow_sections([value[:split] for value in values]), *slow_gpus]
            exit_report.note(stragglers=lines)
            for line in [*report([value[split:] for value in values], self._count), *lines]:
                logger.info(line)
        self._is_on = straggler.stopwatch.is_on = bool(rows[0][0])
        self._steps, self._flops = 0, 0.0

    def _row(self, world_size: int) -> tuple[list[float], list[float]]:
        """Return one value per column, and milliseconds per step in each of `_SECTIONS`.

        Values of columns are NaN where there is no measurement.
        """
        seconds = straggler.stopwatch.lap_s()
        compute_s = seconds[straggler.MODEL]
        data_s = seconds[straggler.DATA]
        seconds[straggler.PASSES] = max(0.0, seconds[straggler.PASSES] - data_s)
        steps = max(1, self._steps)
        sections_ms = [1e3 * seconds[section] / steps for section in _SECTIONS]
        flops = self._flops / FORWARD_AND_BACKWARD / world_size
        throughput = flops / compute_s / 1e12 if compute_s > 0 else 0.0
        gpu = self._read_gpu()
        return [1e3 * compute_s / steps, *gpu, 1e3 * data_s / steps, throughput], sections_ms


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


class Switch:
    """HTTP server whose every request inverts ``is_on``; the response reports the new state.

    It serves one connection at a time, each for at most `_REQUEST_S` seconds and `_REQUEST_BYTES`.
    Connections without a valid request, such as a port scan, are closed and change nothing.
    """

    def __init__(self, is_on: bool, address: tuple[str, int]) -> None:
        self.is_on = is_on
        self._socket: socket.socket | None = None
        self._is_closed = threading.Event()
        host, port = address
        try:
            self._socket = socket.create_server(address)
        except OSError as error:
            logger.warning(
                "--straggler-ctrlr-port %d at %s: %s; the report cannot be switched in this run",
                *(port, host, error),
            )
            return
        threading.Thread(
            target=self._serve, args=(self._socket,), name="straggler switch", daemon=True
        ).start()

    @property
    def port(self) -> int:
        """The port on which it listens."""
        assert self._socket is not None, "it does not listen"
        return int(self._socket.getsockname()[1])

    def close(self) -> None:
        """Stop listening."""
        self._is_closed.set()
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
            self._socket.close()

    def _serve(self, listening: socket.socket) -> None:
        while not self._is_closed.is_set():
            try:
                connection, _ = listening.accept()
                with connection:
                    self._answer(connection)
            except OSError:  # a connection failed, or no file descriptor is free: retry
                self._is_closed.wait(_RETRY_S)

    def _answer(self, connection: socket.socket) -> None:
        if not _REQUEST.match(_first_line(connection)):
            return
        self.is_on = not self.is_on
        text = f"straggler report {'on' if self.is_on else 'off'}\n"
        head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(text)}\r\nConnection: close\r\n\r\n"
        connection.sendall(f"{head}{text}".encode())


def _first_line(connection: socket.socket) -> bytes:
    """Return the data received up to the first line break, within the limits of time and size."""
    deadline_s, data = time.monotonic() + _REQUEST_S, b""
    while b"\n" not in data and len(data) < _REQUEST_BYTES:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            return b""
        connection.settimeout(left_s)
        received = connection.recv(_REQUEST_BYTES - len(data))
        if not received:
            break
        data += received
    connection.settimeout(_REQUEST_S)  # for the response
    return data


def gpu_reader() -> Callable[[], Sequence[float]]:
    """Return a function that reads power, temperature, utilization and clock of this rank's GPU.

    The values are NaN if there is no GPU or no NVML.
    """
    if not device.is_cuda() or not available("pynvml"):
        return lambda: [math.nan] * len(_OF_THE_GPU)
    nvml: Any = require("pynvml", "--log-straggler")
    gpu = Gpu(nvml, device.uuid(), "--log-straggler")
    return lambda: [
        gpu.read("PowerUsage") / 1e3,
        gpu.read("Temperature", nvml.NVML_TEMPERATURE_GPU),
        getattr(gpu.read("UtilizationRates"), "gpu", math.nan),  # NaN after a failure
        gpu.read("ClockInfo", nvml.NVML_CLOCK_SM),
    ]


class KernelDetector:
    """Find the ranks whose GPU kernels are slower than on other ranks."""

    def __init__(self) -> None:
        """Begin to profile.  Raises MissingDependency."""
        self._detector: Any = require(_DETECTOR, "--log-straggler").Detector
        self._detector.initialize(
            scores_to_compute=["relative_perf_scores"],
            gather_on_rank0=True,
            profiling_interval=_PROFILED_STEPS,
        )

    @staticmethod
    def is_offered() -> bool:
        """Return whether this rank has a GPU, and the package is installed."""
        return device.is_cuda() and available(_DETECTOR)

    def step(self) -> AbstractContextManager[None]:
        """Return a context manager that measures the kernels of one step."""
        section: AbstractContextManager[None] = self._detector.detection_section("step")
        return section

    def slow_ranks(self) -> list[str]:
        """Return a line per slow GPU since the last call, on rank 0.  Collective over all ranks."""
        report = self._detector.generate_report()
        if report is None or not report.gpu_relative_perf_scores:
            return []
        slow = report.identify_stragglers()["straggler_gpus_relative"]
        scores = report.gpu_relative_perf_scores
        return [
            f"slow: the kernels of rank {one.rank} on {one.node} have {scores[one.rank]:.0%} of "
            "the speed of the fastest rank"
            for one in sorted(slow, key=lambda one: one.rank)
        ]

    def close(self) -> None:
        """End the profiling."""
        self._detector.shutdown()
