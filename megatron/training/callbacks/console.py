"""Training log on the console, in Megatron-LM's format, on the last rank.

Unlike Megatron-LM, losses that are zero, negative or NaN are printed like others.  Values that
Megatron-LM does not print (tokens/s, MFU) are at the end of the line.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from megatron.training.callbacks.records import EvalRecord, Sink, StepRecord

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
