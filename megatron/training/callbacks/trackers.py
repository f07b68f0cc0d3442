"""Write the values of TensorBoard to experiment trackers: W&B, MLflow, Trackio, Comet, ClearML.

`TrackerSink` passes the values of a record to one `Tracker`, in a thread: a slow or lost server
neither slows training down nor ends it.  The ids of the runs are in ``trackers.json`` in the
directory of --save.  A run that goes on from a checkpoint of that directory continues them.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from queue import Full, Queue
from typing import Any

from megatron.core.optional import require
from megatron.training.callbacks.sinks import EvalRecord, Sink, StepRecord
from megatron.training.step.run import ModelRun, SinkFailed

IDS = "trackers.json"  # in the directory of --save: name of a tracker -> id of its run
MAX_WAITING = 10_000  # records that wait for a tracker before it is switched off
CLOSE_S = 60.0  # limit for sending the last values at the end of the run


@dataclass(frozen=True, kw_only=True)
class Start:
    """How a tracker begins: a new run, or run ``run_id`` of a former process."""

    project: str | None  # None: the client's default
    name: str | None
    entity: str | None
    folder: str  # for files of the client
    values: Mapping[str, Any]  # the arguments
    run_id: str | None


class Tracker(ABC):
    """One run in a tracker.  All methods may raise anything."""

    title: str
    run_id: str
    writer: Any  # for scripts that log

    @abstractmethod
    def __init__(self, client: Any, start: Start) -> None:
        """Begin or continue a run with the package ``client``."""

    @abstractmethod
    def log(self, values: Mapping[str, float], step: int) -> None:
        """Write ``values`` of ``step``."""

    def has(self, tag: str, step: int) -> bool:
        """Return whether a continued run has a value of ``tag`` at ``step`` or later.

        Such a step is written once.  Trackers that replace or drop a second value need no answer.
        """
        return False

    @abstractmethod
    def finish(self) -> None:
        """Mark the run as complete and send what is buffered."""


class Wandb(Tracker):
    title = "Weights & Biases"

    def __init__(self, client: Any, start: Start) -> None:
        os.makedirs(start.folder, exist_ok=True)
        self.writer = client
        arguments: dict[str, Any] = {"config": dict(start.values)}
        if start.run_id is not None:
            arguments = {"id": start.run_id, "resume": "allow"}
        if start.entity:
            arguments["entity"] = start.entity
        client.init(dir=start.folder, name=start.name, project=start.project, **arguments)
        self.run_id = client.run.id

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.writer.log(dict(values), step)  # wandb drops steps that the run has already

    def finish(self) -> None:
        self.writer.finish()


class Mlflow(Tracker):
    title = "MLflow"

    def __init__(self, client: Any, start: Start) -> None:
        self.writer = client
        self._steps: dict[str, int] = {}
        if start.run_id is None:
            if start.project is not None:
                client.set_experiment(start.project)
            self.run_id = client.start_run(run_name=start.name).info.run_id
            items = list(start.values.items())
            for at in range(0, len(items), 100):  # the limit of a request
                client.log_params(dict(items[at : at + 100]))
        else:
            self.run_id = start.run_id
            client.start_run(run_id=start.run_id)
            latest = client.MlflowClient().get_run(start.run_id).to_proto().data.metrics
            self._steps = {metric.key: metric.step for metric in latest}

    def log(self, values: Mapping[str, float], step: int) -> None:
        named = {self._name(tag): value for tag, value in values.items()}
        self.writer.log_metrics(named, step=step, run_id=self.run_id, synchronous=True)

    def has(self, tag: str, step: int) -> bool:
        return step <= self._steps.get(self._name(tag), -1)

    def finish(self) -> None:
        self.writer.end_run()

    @staticmethod
    def _name(tag: str) -> str:
        return re.sub(r"[^\w\-. :/]", "_", tag)


class Trackio(Tracker):
    title = "Trackio"

    def __init__(self, client: Any, start: Start) -> None:
        self.writer = client
        project = start.project or os.environ.get("TRACKIO_PROJECT", "megatron-train")
        name, _, number = (start.run_id or "").rpartition("/")
        how = "must" if number else "never"
        values = dict(start.values)
        self._run = client.init(project, name or start.name, resume=how, config=values)
        if number not in ("", self._run.id):
            raise ValueError(f"a newer run has the name {name}")
        self._last_step = getattr(self._run, "_next_step", 0) - 1
        self.run_id = f"{self._run.name}/{self._run.id}"

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def has(self, tag: str, step: int) -> bool:
        return step <= self._last_step

    def finish(self) -> None:
        self.writer.finish()


class Comet(Tracker):
    title = "Comet"

    def __init__(self, client: Any, start: Start) -> None:
        switches = ("log_code", "parse_args", "auto_metric_logging", "auto_param_logging")
        self.writer = client.start(
            project_name=start.project,
            experiment_key=start.run_id,
            mode=None if start.run_id is None else "get",
            experiment_config=client.ExperimentConfig(
                name=start.name, **dict.fromkeys(switches, False)
            ),
        )
        self.run_id = self.writer.get_key()
        if start.run_id is None:
            self.writer.log_parameters(dict(start.values))

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.writer.log_metrics(dict(values), step=step)

    def finish(self) -> None:
        self.writer.end()


class ClearML(Tracker):
    title = "ClearML"

    def __init__(self, client: Any, start: Start) -> None:
        self.writer = client.Task.init(
            start.project,
            start.name,
            reuse_last_task_id=start.run_id or False,
            continue_last_task=False if start.run_id is None else 0,  # 0 is added to each step
            auto_connect_arg_parser=False,
            auto_connect_frameworks=False,
        )
        self.run_id = self.writer.id
        if start.run_id is None:
            self.writer.set_parameters_as_dict(dict(start.values))

    def log(self, values: Mapping[str, float], step: int) -> None:
        logger = self.writer.get_logger()
        for tag, value in values.items():
            if math.isfinite(value):  # ClearML stores 0 for NaN and infinity
                logger.report_scalar(tag, tag, value, step)

    def finish(self) -> None:
        self.writer.close()


# Name of a tracker -> its package and class.
TRACKERS: dict[str, tuple[str, type[Tracker]]] = {
    "wandb": ("wandb", Wandb),
    "mlflow": ("mlflow", Mlflow),
    "trackio": ("trackio", Trackio),
    "comet": ("comet_ml", Comet),
    "clearml": ("clearml", ClearML),
}


class TrackerSink(Sink):
    """Write records to one tracker."""

    def __init__(self, name: str, run: ModelRun, arguments: Mapping[str, Any]) -> None:
        self.name = name
        package, tracker = TRACKERS[name]
        logging = run.config.logging
        is_wandb = name == "wandb"
        # import late: only the rank that writes needs it
        client = require(package, "--wandb-project" if is_wandb else f"--tracker {name}")
        save = run.config.checkpoint.save
        with _as_sink_failed(f" ({save}/{IDS} is damaged: delete it to start anew)"):
            run_id = _saved_ids(save).get(name) if _goes_on(run) else None
        start = Start(
            project=(logging.wandb_project if is_wandb else logging.tracker_project) or None,
            name=(logging.wandb_exp_name if is_wandb else logging.tracker_run) or None,
            entity=logging.wandb_entity,
            folder=logging.wandb_save_dir or os.path.join(save or ".", "wandb"),
            values={key: _plain(value) for key, value in arguments.items()},
            run_id=run_id,
        )
        cure = "" if run_id is None else f" (run {run_id} of {save}/{IDS}: delete it to start anew)"
        with _as_sink_failed(cure):
            self._tracker = tracker(client, start)
        if save is not None and self._tracker.run_id != run_id:
            with _as_sink_failed(f" ({save}/{IDS} cannot be written)"):
                _save_id(save, name, self._tracker.run_id)
        self._waiting: Queue[tuple[dict[str, float], int] | None] = Queue(MAX_WAITING)
        self._error: SinkFailed | None = None
        self._thread = threading.Thread(target=self._send, name=tracker.title, daemon=True)
        self._thread.start()

    @property
    def writer(self) -> Any:
        return self._tracker.writer

    def write_step(self, record: StepRecord) -> None:
        values = {**record.values, **record.losses}
        if values:
            values["samples vs steps"] = record.consumed_samples
            self._put((values, record.iteration))

    def write_eval(self, record: EvalRecord) -> None:
        self._put((record.tagged, record.iteration))

    def close(self) -> None:
        self._put(None)
        self._thread.join(CLOSE_S)
        if self._error is not None:
            raise self._error
        if self._thread.is_alive():
            raise SinkFailed(f"the last {self._waiting.qsize()} records were not sent in time")
        with _as_sink_failed():
            self._tracker.finish()

    def _put(self, item: tuple[dict[str, float], int] | None) -> None:
        if self._error is not None:
            raise self._error
        try:
            self._waiting.put_nowait(item)
        except Full:
            raise SinkFailed(f"{MAX_WAITING} records wait to be sent") from None

    def _send(self) -> None:
        """Pass what waits to the tracker until `close`."""
        try:
            while (item := self._waiting.get()) is not None:
                values, step = item
                is_new = {tag: v for tag, v in values.items() if not self._tracker.has(tag, step)}
                if is_new:
                    with _as_sink_failed():
                        self._tracker.log(is_new, step)
        except SinkFailed as error:
            self._error = error


def _goes_on(run: ModelRun) -> bool:
    """Return whether the run was loaded from a checkpoint that it saved itself."""
    options = run.config.checkpoint
    if options.save is None or run.state.iteration == 0:
        return False
    save = Path(options.save).resolve()
    loaded = [Path(path).resolve() for path in (options.load, run.checkpoints.loaded_from) if path]
    return any(save in (path, *path.parents) for path in loaded)


def _saved_ids(save: str | None) -> dict[str, str]:
    try:
        ids: dict[str, str] = json.loads(Path(save or "", IDS).read_text())
    except FileNotFoundError:
        return {}
    return ids


def _save_id(save: str, name: str, run_id: str) -> None:
    path = Path(save, IDS)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**_saved_ids(save), name: run_id}, indent=1)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text + "\n")
    temporary.replace(path)


def _plain(value: Any) -> Any:
    """Return a value that every client accepts."""
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


@contextlib.contextmanager
def _as_sink_failed(more: str = "") -> Iterator[None]:
    """Convert any exception of a client to SinkFailed: they have no common base class."""
    try:
        yield
    except Exception as error:
        raise SinkFailed(f"{type(error).__name__}: {error}{more}") from error
