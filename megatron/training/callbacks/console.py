"""Training log and progress bar on the console, in Megatron-LM's format, on the last rank.

Unlike Megatron-LM, losses that are zero, negative or NaN are printed like others.  Values that
Megatron-LM does not print (tokens/s, MFU) are at the end of the line.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import TextIO

from megatron.training.callbacks.records import EvalRecord, Sink, StepRecord
from megatron.training.runtime.context import StepResult
from megatron.training.step.run import Callback, TrainingRun

# Label -> format.  Labels without an entry are losses.
FORMATS: dict[str, str] = {
    "consumed samples": "12d",
    "skipped samples": "12d",
    "elapsed time per iteration (ms)": ".1f",
    "throughput per GPU (TFLOP/s/GPU)": ".1f",
    "energy per GPU (J/iter/GPU)": ".1f",
    "power per GPU (W/GPU)": ".1f",
    "learning rate": ".6E",
    "decoupled learning rate": ".6E",
    "global batch size": "5d",
    "loss scale": ".1f",
    "grad norm": ".3f",
    "num zeros": "",
    "params norm": ".3f",
    "number of skipped iterations": "3d",
    "number of nan iterations": "3d",
    "tokens/s": ".1f",
    "MFU": ".2f",
}
_LOSS_FORMAT = ".6E"
_UNITS = {"MFU": " %"}
_BAR_WIDTH = 30
_TERMINAL = "/dev/tty"

logger = logging.getLogger(__name__)


class ConsoleSink(Sink):
    """Print one line per log interval and one block per evaluation."""

    name = "console output"
    takes_repeated_evals = True  # Megatron-LM ends its log with them

    def write_step(self, record: StepRecord) -> None:
        if record.interval is not None:
            now = time.strftime("%Y-%m-%d %H:%M:%S")
            line = training_line(record.iteration, record.train_iters, record.interval)
            print(f" [{now}]{line}", flush=True)

    def write_eval(self, record: EvalRecord) -> None:
        print(validation_block(record), flush=True)


def training_line(iteration: int, train_iters: int, interval: Mapping[str, float]) -> str:
    """Return the line of one interval, from the iteration number on."""
    fields = [f" iteration {iteration:8d}/{train_iters:8d} |"]
    for label, value in interval.items():
        text = format(value, FORMATS.get(label, _LOSS_FORMAT))
        fields.append(f" {label}: {text}{_UNITS.get(label, '')} |")
    return "".join(fields)


def validation_block(record: EvalRecord) -> str:
    """Return the line of one evaluation between two rules."""
    where = f"iteration {record.iteration}"
    if record.is_final:
        where += f" on {record.split} set"
    text = f" validation{record.suffix} loss at {where} | "
    perplexities = record.perplexities
    for key, loss in record.losses.items():
        text += f"{key} value: {loss:.6E} | "
        if key in perplexities:
            text += f"{key} PPL: {perplexities[key]:.6E} | "
    rule = "-" * (len(text) + 1)
    return f"{rule}\n{text}\n{rule}"


def terminal(asked: bool | None) -> TextIO | None:
    """Return the stream for the progress bar, or None for no bar; never a file.

    ``asked`` is --progress-bar.  The stream is standard error if it is a terminal.  Otherwise, if a
    bar is requested, it is the terminal from which the run was started.
    """
    if asked is False:
        return None
    if sys.stderr.isatty():
        return sys.stderr
    if asked is None:
        return None
    try:
        return open(_TERMINAL, "w")  # noqa: SIM115 - closed by the bar
    except OSError:
        logger.warning(
            "--progress-bar is without effect: standard error is no terminal and none started "
            "this run",
            extra={"all_ranks": True},  # the bar is on the last rank
        )
        return None


class ProgressBar(Callback):
    """Draw a progress bar on a terminal while a step runs, and erase it after the step.

    It must be the first callback, so that the bar is erased before another callback prints.
    """

    log_name = "progress bar"

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._started_at_s = 0.0
        self._first_iteration = 0

    def on_train_start(self, run: TrainingRun) -> None:
        self._started_at_s = time.monotonic()
        self._first_iteration = run.state.iteration

    def on_step_start(self, run: TrainingRun) -> None:
        done, total = run.state.iteration, run.train_iters
        filled = _BAR_WIDTH * done // total
        bar = "#" * filled + "." * (_BAR_WIDTH - filled)
        steps, elapsed_s = done - self._first_iteration, time.monotonic() - self._started_at_s
        left_s = int(elapsed_s / steps * (total - done)) if steps else 0
        left = f" {timedelta(seconds=left_s)} left" if steps else ""
        self._stream.write(f"\r[{bar}] {done}/{total}{left}\x1b[K")
        self._stream.flush()

    def on_step_end(self, run: TrainingRun, result: StepResult) -> None:
        self._stream.write("\r\x1b[K")
        self._stream.flush()

    def close(self) -> None:
        if self._stream is not sys.stderr:
            self._stream.close()
