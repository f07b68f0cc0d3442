"""Record CPU time, wall time and scheduling delay at the end of each training step (--callback).

    STEP_CLOCK=FILE python pretrain_gpt.py ... --callback benchmarks.step_clock:StepClock

Rank R writes ``FILE.R`` at the end of the training: a JSON list of [CPU ns, wall ns, delay ns], one
entry per step.  The CPU time is that of all threads of the process.  The delay is the time in which
the main thread was ready and other processes had the cores.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from megatron.training.callbacks import Callback, StepResult, TrainingRun

VARIABLE = "STEP_CLOCK"
_SCHEDULER = Path("/proc/self/schedstat")  # of the main thread: CPU ns, delay ns, time slices


class StepClock(Callback):
    """Clock of the steps of this rank."""

    def __init__(self) -> None:
        self._ends: list[tuple[int, int, int]] = []

    def on_step_end(self, run: TrainingRun, result: StepResult) -> None:
        """Read the clocks."""
        delay_ns = int(_SCHEDULER.read_text().split()[1])
        self._ends.append((time.process_time_ns(), time.perf_counter_ns(), delay_ns))

    def on_train_end(self, run: TrainingRun) -> None:
        """Write the file."""
        name = f"{os.environ[VARIABLE]}.{os.environ.get('RANK', '0')}"
        Path(name).write_text(json.dumps(self._ends))
