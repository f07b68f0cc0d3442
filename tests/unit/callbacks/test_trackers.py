"""Experiment trackers: the values of a run under their tags; a resumed run goes on in its own.

tests/functional/test_trackers.py has the real clients.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.core.config.errors import MissingDependency
from megatron.training.callbacks import trackers
from megatron.training.callbacks.metrics import Metrics
from megatron.training.callbacks.sinks import EvalRecord, StepRecord
from megatron.training.callbacks.trackers import Start, Tracker, TrackerSink
from megatron.training.checkpointing.checkpointer import Checkpointer
from megatron.training.step.run import CallbackList, EvalResult, SinkFailed
from tests.support.callback_calls import fake_run, run_config, step_result


class Listed(Tracker):
    """A tracker that keeps what it gets; continued runs have the first three steps."""

    title = "Listed"
    opened: list[Start] = []

    def __init__(self, client: Any, start: Start) -> None:
        self.opened.append(start)
        self.run_id = start.run_id or f"run {len(self.opened)}"
        self.writer = self
        self.logged: list[tuple[int, Mapping[str, float]]] = []
        self._last = 3 if start.run_id else 0

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.logged.append((step, values))

    def has(self, tag: str, step: int) -> bool:
        return step <= self._last and "validation" not in tag

    def finish(self) -> None:
        pass


@pytest.fixture(autouse=True)
def listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "require", lambda package, wanted_by: None)
    monkeypatch.setitem(trackers.TRACKERS, "mlflow", ("mlflow", Listed))
    monkeypatch.setattr(Listed, "opened", [])


def step_of(iteration: int) -> StepRecord:
    return StepRecord(
        iteration=iteration,
        train_iters=10,
        consumed_samples=8 * iteration,
        losses={"lm loss": 1.0},
        values={},
        interval=None,
    )


def eval_of(iteration: int) -> EvalRecord:
    return EvalRecord(
        iteration=iteration,
        consumed_samples=8 * iteration,
        losses={"lm loss": 0.0},
        split="validation",
        suffix="",
        is_final=False,
    )


def id_of(save: Path, flags: str, iteration: int, loaded_from: Path | None) -> str | None:
    """Return the id with which a run that saves to ``save`` opens its tracker."""
    checkpoints = Checkpointer(loaded_from=None if loaded_from is None else str(loaded_from))
    run = fake_run(f"--tracker mlflow --save {save} {flags}", checkpoints=checkpoints)
    run.state.iteration = iteration
    TrackerSink("mlflow", run, {}).close()
    return Listed.opened[-1].run_id


def test_a_run_goes_on_in_its_tracker_run_if_it_goes_on_from_its_own_checkpoint(
    tmp_path: Path,
) -> None:
    save, other = tmp_path / "a", tmp_path / "b"
    assert id_of(save, f"--load {save}", 0, None) is None
    assert id_of(save, f"--load {save}", 0, None) is None, "without a checkpoint: a new run"
    assert id_of(save, f"--load {save}", 4, save / "iter_0000004") == "run 2"
    assert id_of(save, f"--load {save}", 4, Path("/dev/shm/x")) == "run 2", "a local checkpoint"
    assert id_of(save, f"--load {other}", 6, save / "iter_0000006") == "run 2", "--finetune again"
    assert id_of(other, f"--load {save}", 4, save / "iter_0000004") is None, "another --save"
    assert id_of(tmp_path / "ab", f"--load {save}", 4, save / "iter_0000004") is None
    assert json.loads((save / "trackers.json").read_text()) == {"mlflow": "run 2"}


def test_steps_that_the_continued_run_has_are_not_written_again(tmp_path: Path) -> None:
    run = fake_run(f"--tracker mlflow --save {tmp_path} --load {tmp_path}")
    (tmp_path / "trackers.json").write_text('{"mlflow": "x"}')
    run.state.iteration = 2
    sink = TrackerSink("mlflow", run, {})
    for iteration in (3, 4):
        sink.write_step(step_of(iteration))
        sink.write_eval(eval_of(iteration))
    sink.close()
    evaluation = {"lm loss validation": 0.0, "lm loss validation ppl": 1.0}
    assert sink.writer.logged == [
        (3, evaluation),
        (4, {"lm loss": 1.0, "samples vs steps": 32}),
        (4, evaluation),
    ]


def test_a_tracker_that_does_not_answer_stops_no_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waiting, answers = threading.Event(), threading.Event()
    monkeypatch.setattr(Listed, "log", lambda *_: waiting.set() or answers.wait())
    monkeypatch.setattr(trackers, "MAX_WAITING", 3)
    sink = TrackerSink("mlflow", fake_run("--tracker mlflow"), {})
    sink.write_step(step_of(1))
    waiting.wait()
    for iteration in (2, 3, 4):
        sink.write_step(step_of(iteration))
    with pytest.raises(SinkFailed, match="3 records wait to be sent"):
        sink.write_step(step_of(5))
    answers.set()


def test_a_run_that_cannot_be_continued_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Listed, client: Any, start: Start) -> None:
        raise LookupError("no such run")

    monkeypatch.setattr(Listed, "__init__", fail)
    (tmp_path / "trackers.json").write_text('{"mlflow": "x"}')
    run = fake_run(f"--tracker mlflow --save {tmp_path} --load {tmp_path}")
    run.state.iteration = 2
    with pytest.raises(SinkFailed, match=r"no such run \(run x of .*trackers.json: delete it"):
        TrackerSink("mlflow", run, {})


@pytest.mark.parametrize("text", ["", "[1]", '{"mlflow": "x", ', "\x00"])
def test_a_damaged_file_of_ids_switches_the_tracker_off(tmp_path: Path, text: str) -> None:
    (tmp_path / "trackers.json").write_text(text)
    run = fake_run(f"--tracker mlflow --save {tmp_path} --load {tmp_path}")
    run.state.iteration = 2
    with pytest.raises(SinkFailed, match=r"trackers.json is damaged: delete it"):
        TrackerSink("mlflow", run, {})


def test_a_package_that_is_missing_is_named_with_its_flag_and_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(
        "megatron.core.optional.why_missing", lambda package: f"{package} is not installed"
    )
    flags = {
        "wandb": r"--wandb-project: wandb is not installed; pip install .*\[log\]",
        "comet": r"--tracker comet: comet_ml is not installed; pip install .*\[trackers\]",
    }
    for name, text in flags.items():
        with pytest.raises(MissingDependency, match=text):
            TrackerSink(name, fake_run(), {})


def test_flags_of_trackers() -> None:
    logging = run_config("--tracker trackio mlflow --tracker-project p --tracker-run r").logging
    assert logging.tracker == ("trackio", "mlflow")
    assert (logging.tracker_project, logging.tracker_run) == ("p", "r")
    (warning,) = run_config("--tracker-run r").warnings
    assert "--tracker-run" in warning
    assert "--tracker" in warning


@pytest.mark.feature("Logging: Weights & Biases")
def test_wandb_gets_the_numbers_under_their_tags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    fake = SimpleNamespace(
        init=lambda **settings: calls.append(settings),
        log=lambda values, step: calls.append((step, values)),
        finish=lambda: calls.append("finish"),
        run=SimpleNamespace(id="1"),
    )
    monkeypatch.setattr(trackers, "require", lambda package, wanted_by: fake)
    run = fake_run(
        f"--wandb-project p --wandb-exp-name e --wandb-entity team --wandb-save-dir {tmp_path} "
        "--log-interval 2"
    )
    metrics = Metrics([TrackerSink("wandb", run, {"lr": 1e-3, "dtype": run.config.model})])
    callbacks = CallbackList([metrics])
    assert callbacks.writers() == {"wandb": fake}
    metrics.on_train_start(run)
    run.state.advance(step_result(), 0.0)
    metrics.on_step_end(run, step_result())
    metrics.on_eval_end(run, EvalResult(losses={"lm loss": 0.0}, set_index=1))
    metrics.close()
    init, (iteration, values), (_, evaluation), end = calls
    config = init.pop("config")
    assert init == {"dir": str(tmp_path), "name": "e", "project": "p", "entity": "team"}
    assert config["lr"] == 1e-3
    assert isinstance(config["dtype"], str)
    assert iteration == 1
    assert values["lm loss"] == 6.25
    assert values["learning-rate"] == 1e-3
    assert values["samples vs steps"] == 8
    assert evaluation == {"lm loss validation-1": 0.0, "lm loss validation-1 ppl": 1.0}
    assert end == "finish"
