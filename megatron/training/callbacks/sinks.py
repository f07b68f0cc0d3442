"""Sinks: where the records of steps and evaluations are written.  Trackers are in `trackers`.

A record is built once and passed to every sink, so that all of them read each value from the same
field.  Only the last rank has sinks.

Console: Megatron-LM's format.  Unlike there, losses that are zero, negative or NaN are printed like
others.  Values that Megatron-LM does not print (tokens/s, MFU) are at the end of the line.

TensorBoard: Megatron-LM's tags.  Most have a second curve, ``{tag} vs samples``, whose step is the
number of consumed samples.

Metrics file (--metrics-file): JSON, one object per line.  A line has ``kind`` (step, validation or
test), ``iteration``, ``consumed_samples``, ``time`` (seconds since the epoch) and the values by
TensorBoard tag.  ``interval`` holds the fields of the console line of that step.  NaN and
infinities are the strings "NaN", "Infinity", "-Infinity": the file is strict JSON.  Each line is
one write, so that a reader sees complete lines only, even after a kill.  A resumed run truncates
the lines after the iteration that it continues from.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, BinaryIO, Literal

from megatron.core.diagnostics.log_once import warn_switched_off
from megatron.core.optional import require
from megatron.training.config.logging import LoggingConfig
from megatron.training.process.rank_print import CLEAR, print_live
from megatron.training.step.run import SINK_ERRORS

logger = logging.getLogger(__name__)

_PERPLEXITY = " ppl"  # end of its tag
_LIKELIHOOD = "lm loss"  # mean negative log-likelihood of a token


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """Metrics of one step.

    ``losses`` and ``values`` are filled at --tensorboard-log-interval.  ``interval`` is filled at
    --log-interval and covers the steps since the last line.
    """

    iteration: int
    train_iters: int
    consumed_samples: int
    losses: Mapping[str, float]  # loss key -> value of this step
    values: Mapping[str, float]  # TensorBoard tag -> value, without the losses
    interval: Mapping[str, float] | None  # console label -> value, in the order of the line


@dataclass(frozen=True, kw_only=True)
class EvalRecord:
    """Result of one evaluation of one dataset."""

    iteration: int
    consumed_samples: int
    losses: Mapping[str, float]
    split: Literal["validation", "test"]
    suffix: str  # "" or, with several validation sets, "-0", "-1", ...
    is_final: bool

    @property
    def perplexities(self) -> dict[str, float]:
        """exp of the language-model loss, which is limited to 20; NaN if the loss is NaN.

        Other values (rewards, accuracies, losses of pairs) are no likelihoods of tokens.
        """
        losses = {key: loss for key, loss in self.losses.items() if key == _LIKELIHOOD}
        return {key: math.exp(min(loss, 20.0)) for key, loss in losses.items()}

    @property
    def tagged(self) -> dict[str, float]:
        """TensorBoard tag -> value of all losses and perplexities."""
        values = {}
        perplexities = self.perplexities
        for key, loss in self.losses.items():
            tag = f"{key} {self.split}{self.suffix}"
            values[tag] = loss
            if key in perplexities:
                values[tag + _PERPLEXITY] = perplexities[key]
        return values


class Sink(ABC):
    """A destination of records; its methods raise one of SINK_ERRORS when it cannot write.

    ``name`` identifies its writer for scripts, ``log_name`` is its name in warnings.
    """

    name: str
    log_name: str
    takes_repeated_evals = False  # whether it writes an evaluation again at the end of the run

    @abstractmethod
    def write_step(self, record: StepRecord) -> None:
        """Write the values of a step that this sink logs."""

    @abstractmethod
    def write_eval(self, record: EvalRecord) -> None:
        """Write an evaluation."""

    def close(self) -> None:
        """Write buffered records and release resources."""
        return

    @property
    def writer(self) -> Any:
        """The object that scripts may write to directly, or None."""
        return None


def open_sink(sinks: list[Sink], log_name: str, make: Callable[[], Sink]) -> None:
    """Append the sink that ``make`` returns; if that fails, warn instead."""
    try:
        sink = make()
    except SINK_ERRORS as error:
        warn_switched_off(log_name, error)
        return
    sink.log_name = log_name
    sinks.append(sink)


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


SAMPLES = " vs samples"
# Tags besides the losses that also get a curve over samples.
WITH_TWIN = frozenset(
    "learning-rate batch-size loss-scale world-size grad-norm num-zeros params-norm".split()
)


class TensorBoardSink(Sink):
    """Write scalars and, at the start from ``iteration``, the arguments as text."""

    name = "tensorboard"

    def __init__(self, config: LoggingConfig, arguments: Mapping[str, Any], iteration: int) -> None:
        self._config = config
        # import late: only the rank that writes needs it
        tensorboard = require("torch.utils.tensorboard", "--tensorboard-dir")
        self._writer = tensorboard.SummaryWriter(
            log_dir=config.tensorboard_dir, max_queue=config.tensorboard_queue_size
        )
        for name, value in arguments.items():
            self._writer.add_text(name, str(value), global_step=iteration)

    @property
    def writer(self) -> Any:
        return self._writer

    def write_step(self, record: StepRecord) -> None:
        for tag, value in {**record.values, **record.losses}.items():
            if tag == "loss-scale" and not self._config.log_loss_scale_to_tensorboard:
                continue
            self._writer.add_scalar(tag, value, record.iteration)
            if tag in WITH_TWIN or tag in record.losses:
                self._writer.add_scalar(tag + SAMPLES, value, record.consumed_samples)
        if record.interval is not None:
            self._writer.flush()  # keep what the console has shown if the run is killed

    def write_eval(self, record: EvalRecord) -> None:
        has_perplexities = self._config.log_validation_ppl_to_tensorboard
        for tag, value in record.tagged.items():
            if has_perplexities or not tag.endswith(_PERPLEXITY):
                self._writer.add_scalar(tag, value, record.iteration)
                self._writer.add_scalar(tag + SAMPLES, value, record.consumed_samples)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class MetricsFileSink(Sink):
    """Append metrics to ``path``; the run starts from ``iteration``."""

    name = "metrics file"

    def __init__(self, path: str, iteration: int) -> None:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        if os.path.isfile(path) and not path.startswith("/dev/"):
            if iteration == 0 or not _is_metrics_file(path):
                if os.path.getsize(path):
                    os.replace(path, path + ".previous")
                    told = {"all_ranks": True}
                    logger.info("what was in %s is now in %s.previous", path, path, extra=told)
            else:
                cut_after(path, iteration)
        self._file: BinaryIO = open(path, "ab", buffering=0)  # noqa: SIM115

    def write_step(self, record: StepRecord) -> None:
        line = {**_head("step", record), **record.losses, **record.values}
        if record.interval is not None:
            line["interval"] = dict(record.interval)
        self._write(line)

    def write_eval(self, record: EvalRecord) -> None:
        line = _head(record.split, record)
        line["final"] = record.is_final
        self._write(line | record.tagged)

    def close(self) -> None:
        self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write((json.dumps(_strict(line), allow_nan=False) + "\n").encode())


def cut_after(path: str, iteration: int) -> None:
    """Truncate the file after the lines up to ``iteration``, and before an incomplete last line.

    The final evaluations of the former run are removed too, because the resumed run repeats them.
    """
    keep = 0
    with open(path, "rb") as file:
        for line in file:
            if not _is_kept(line, iteration):
                break
            keep += len(line)
    if keep < os.path.getsize(path):
        os.truncate(path, keep)


def _is_metrics_file(path: str) -> bool:
    """Return whether the first line is one of ours; files of others are never truncated."""
    with open(path, "rb") as file:
        line = file.readline()
    is_cut = not line.endswith(b"\n")
    return line.startswith(b"{") if is_cut else _is_kept(line, sys.maxsize)


def _is_kept(line: bytes, iteration: int) -> bool:
    if not line.endswith(b"\n"):
        return False
    try:
        values = json.loads(line)
        last = iteration - 1 if values.get("final") else iteration
        return int(values["iteration"]) <= last
    except (ValueError, KeyError, TypeError, AttributeError):
        return False


def _head(kind: str, record: StepRecord | EvalRecord) -> dict[str, Any]:
    return {
        "kind": kind,
        "iteration": record.iteration,
        "consumed_samples": record.consumed_samples,
        "time": round(time.time(), 3),
    }


def _strict(value: Any) -> Any:
    """Return ``value`` with numbers that JSON lacks as strings."""
    if isinstance(value, dict):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
