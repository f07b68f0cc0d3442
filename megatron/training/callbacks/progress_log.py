"""Log the history of a run over many jobs in ``progress.txt`` under --save (--log-progress).

Rank 0 appends tab-separated lines: date, ``Job ID: N``, ``# GPUs: N``, event.  For a saved
checkpoint these follow: iteration, throughput of this job, throughput since the first of the latest
consecutive jobs with this number of GPUs, floating-point operations and tokens of the run so far.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from megatron.training.checkpointing.checkpointer import CheckpointEvent
from megatron.training.step.run import Callback, SinkFailed, TrainingRun

_DATE = "%Y-%m-%d %H:%M:%S"
_EVENTS = {
    "saved": "Saved checkpoint",
    "scheduled": "Saving async checkpoint",
    "finalized": "Saved async checkpoint",
    "deleted": "Deleted checkpoint",
}


class ProgressLog(Callback):
    """Write the progress log; only rank 0 has this callback."""

    def __init__(self, folder: str, world_size: int) -> None:
        self._path = Path(folder) / "progress.txt"
        self._world_size = world_size
        self._flops_at_start = 0.0
        self.log_name = f"progress log {self._path}"

    def on_train_start(self, run: TrainingRun) -> None:
        self._flops_at_start = run.state.num_floating_point_operations_so_far
        self._append("Starting job")

    def on_checkpoint(self, run: TrainingRun, event: CheckpointEvent) -> None:
        fields = [_EVENTS[event.kind], f"Iteration: {event.iteration}"]
        if event.kind in ("saved", "scheduled"):
            fields += self._totals(run)
        self._append(*fields)

    def _totals(self, run: TrainingRun) -> list[str]:
        flops = run.state.num_floating_point_operations_so_far
        # Like Megatron-LM; for T5 this counts encoder tokens only.
        tokens = run.state.consumed_train_samples * run.config.data.seq_length
        now_s = time.time()
        job = (flops - self._flops_at_start) / (now_s - run.started_at_s)
        try:
            start = series_start(self._path.read_text().splitlines(), self._world_size)
        except (ValueError, IndexError) as error:  # a line that this class did not write
            raise SinkFailed(f"it holds a damaged line: {error}") from error
        started_at_s, flops_before = start or (run.started_at_s, self._flops_at_start)
        # the file has dates in whole seconds, so the difference may be close to 0
        cumulative = (flops - flops_before) / max(1.0, now_s - started_at_s)
        scale = 1e12 * self._world_size
        return [
            f"Job throughput: {job / scale:.1f} TFLOP/s/GPU",
            f"Cumulative throughput: {cumulative / scale:.1f} TFLOP/s/GPU",
            f"Floating-point operations: {flops:.2e}",
            f"Tokens (in billions): {tokens / 1e9:.2f}",
        ]

    def _append(self, *event: str) -> None:
        job = os.environ.get("SLURM_JOB_ID", "")
        line = [time.strftime(_DATE), f"Job ID: {job}", f"# GPUs: {self._world_size}", *event]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write("\t".join(line) + "\n")


def series_start(lines: list[str], world_size: int) -> tuple[float, float] | None:
    """Return the start of the latest consecutive jobs on ``world_size`` GPUs, or None.

    It is a time in seconds, and the floating-point operations of the run before that time.
    ``lines`` are the lines of the file.  Raise ValueError or IndexError for a damaged line.
    """
    start: tuple[float, float] | None = None
    flops = 0.0
    for line in lines:
        columns = line.split("\t")
        if len(columns) < 4:
            continue
        if columns[3] in ("Saved checkpoint", "Saving async checkpoint") and len(columns) > 7:
            flops = float(columns[7].split(": ")[1])
        if int(columns[2].split(": ")[1]) != world_size:
            start = None
        elif start is None and columns[3] == "Starting job":
            start = time.mktime(time.strptime(columns[0], _DATE)), flops
    return start
