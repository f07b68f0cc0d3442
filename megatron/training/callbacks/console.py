"""Training log on the console, in Megatron-LM's format, on the last rank.

Unlike Megatron-LM, losses that are zero, negative or NaN are printed like others.  Values that
Megatron-LM does not print (tokens/s, MFU) are at the end of the line.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from datetime import timedelta

from megatron.training.callbacks.records import EvalRecord, Sink, StepRecord
from megatron.training.process.rank_print import CLEAR, print_live

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


class ShortSink(Sink):
    """Print a short line per log interval and per evaluation; on a terminal, follow each step."""

    name = "console output"

    def __init__(self, tokens_per_sample: int) -> None:
        self._tokens_per_sample = tokens_per_sample
        self._first: tuple[float, int, int] | None = None  # time in s, iteration, samples

    def write_step(self, record: StepRecord) -> None:
        now_s = time.monotonic()
        # The first step is not measured: it starts what later ones use.
        self._first = self._first or (now_s, record.iteration, record.consumed_samples)
        began_s, iteration, samples = self._first
        elapsed_s = now_s - began_s
        steps = record.iteration - iteration
        fields = [f"step {record.iteration:,}/{record.train_iters:,}"]
        interval = record.interval or {}
        losses = {k: v for k, v in interval.items() if _is_loss(k)} or record.losses
        fields += [f"{name} {value:.4f}" for name, value in losses.items()]
        for name, label in (("grad norm", "grad norm"), ("learning rate", "lr")):
            if name in interval:
                fields.append(f"{label} {interval[name]:#.4g}")
        if steps > 0:
            rate = (record.consumed_samples - samples) * self._tokens_per_sample / elapsed_s
            rest_s = elapsed_s / steps * (record.train_iters - record.iteration)
            fields += [f"{rate:,.0f} tokens/s", f"{timedelta(seconds=round(rest_s))} left"]
        text = " | ".join(fields)
        if record.interval is None:
            print_live(text)
        else:
            _print_line(text)

    def write_eval(self, record: EvalRecord) -> None:
        values = {**record.losses, **{f"{k} PPL": v for k, v in record.perplexities.items()}}
        fields = [f"{record.split}{record.suffix} at step {record.iteration:,}"]
        _print_line(" | ".join([*fields, *(f"{name} {v:.4f}" for name, v in values.items())]))


def _is_loss(label: str) -> bool:
    return label not in FORMATS and not label.startswith("tokens ")


def _print_line(text: str) -> None:
    print(f"{CLEAR if sys.stdout.isatty() else ''}{text}", flush=True)


def training_line(iteration: int, train_iters: int, interval: Mapping[str, float]) -> str:
    """Return the line of one interval, from the iteration number on."""
    fields = [f" iteration {iteration:8d}/{train_iters:8d} |"]
    for label, value in interval.items():
        text = format(value, FORMATS.get(label, _LOSS_FORMAT if _is_loss(label) else "d"))
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
