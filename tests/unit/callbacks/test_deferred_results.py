"""Callbacks and logs of steps that the host judges when the next step is queued."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.core.registry import Registry
from megatron.training import loop
from megatron.training.callbacks import user_metrics
from megatron.training.callbacks.checkpoint import CheckpointCallback
from megatron.training.callbacks.default import default_callbacks
from megatron.training.callbacks.metrics import Metrics
from megatron.training.runtime.runtime import Callback, CallbackList
from megatron.training.runtime.state import StepResult
from tests.unit.callbacks.helpers import fake_run, step_result
from tests.unit.callbacks.test_metrics import Recorder, sinks_of

FLAGS = "--log-interval 3"


class Silent(Callback):
    """Counts checkpoints, which need no result."""

    def on_checkpoint(self, run: Any, event: Any) -> None: ...


class Sometimes(Callback):
    """Reads every second result."""

    def needs_result(self, run: Any, iteration: int) -> bool:
        return iteration % 2 == 0

    def on_step_end(self, run: Any, result: Any) -> None: ...


class Always(Callback):
    """Looks at the weights before each step."""

    def on_step_start(self, run: Any) -> None: ...


def test_a_callback_needs_results_unless_it_says_otherwise() -> None:
    run = fake_run()
    assert not Silent().needs_result(run, 2)
    assert [Sometimes().needs_result(run, i) for i in (1, 2)] == [False, True]
    assert [CallbackList([Silent(), Sometimes()]).needs_result(run, i) for i in (1, 2)] == [
        False,
        True,
    ]
    assert Always().needs_result(run, 1)
    watched = [
        loop._has_watcher(SimpleNamespace(callbacks=[Silent(), each]))  # type: ignore[arg-type]
        for each in (Silent(), Sometimes(), Always())
    ]
    assert watched == [False, False, True]


@pytest.mark.parametrize(
    ("flags", "needed"),
    [
        ("", []),
        ("--log-interval 4", [4, 8]),
        ("--save c --save-interval 5", [5]),
        ("--save c --non-persistent-save-interval 3 --non-persistent-ckpt-type global", [3, 6]),
        ("--exit-interval 7", [7]),
        ("--eval-interval 2", [2, 4, 6, 8]),
        ("--manual-gc --manual-gc-interval 2 --train-sync-interval 2", []),
        ("--profile --profile-step-start 1 --profile-step-end 3", []),
    ],
)
def test_only_what_happens_at_its_end_needs_the_result_of_a_step(
    flags: str, needed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    run = fake_run(f"--log-interval 100 --eval-interval 100 {flags}")
    callbacks = default_callbacks(run)
    assert [i for i in range(1, 9) if callbacks.needs_result(run, i)] == needed
    assert not loop._has_watcher(SimpleNamespace(callbacks=callbacks))  # type: ignore[arg-type]


def test_a_change_of_the_batch_size_needs_the_result_of_the_step_before_it() -> None:
    sizes = {0: 4, 4: 4, 8: 8, 16: 8}
    batches = SimpleNamespace(global_batch_size=sizes.__getitem__)
    run = fake_run("--save c", batches=batches)
    found = []
    for consumed in (0, 4, 8):
        run.state.consumed_train_samples = consumed
        found.append(CheckpointCallback().needs_result(run, 1))
    assert found == [False, True, False]


def test_metrics_of_users_need_the_results_that_are_logged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(user_metrics, "_METRICS", Registry("the metric", {}))
    run = fake_run(f"{FLAGS} --tensorboard-log-interval 2")
    metrics = Metrics(sinks_of())
    assert [i for i in range(1, 7) if metrics.needs_result(run, i)] == [3, 6]
    user_metrics.register_metric("of-this-test", lambda run, result: {})
    assert [i for i in range(1, 7) if metrics.needs_result(run, i)] == [2, 3, 4, 6]


def _judge(result: StepResult, **values: Any) -> None:
    vars(result).update(values, is_judged=True)


def _begin() -> tuple[Any, Metrics, Recorder]:
    recorder = Recorder()
    run = fake_run(FLAGS)
    metrics = Metrics(sinks_of(lambda: recorder))
    metrics.on_train_start(run)
    return run, metrics, recorder


def _step(run: Any, metrics: Metrics, **changes: Any) -> StepResult:
    result = step_result(**changes)
    run.state.advance(result, 0.0)
    metrics.on_step_end(run, result)
    return result


UNKNOWN = {"is_judged": False, "grad_norm": None, "learning_rate": 0.0}


def test_a_step_is_written_when_it_is_judged() -> None:
    run, metrics, recorder = _begin()
    first = _step(run, metrics, **UNKNOWN)
    metrics.on_pause(run, "checkpoint")  # of a save in the background, which ends now
    metrics.on_resume(run, "checkpoint")
    assert recorder.steps == []
    _judge(first, grad_norm=2.0, learning_rate=3.0, skipped=True)
    second = _step(run, metrics, **UNKNOWN)
    (record,) = recorder.steps
    assert (record.iteration, record.losses) == (1, {"lm loss": 6.25})
    assert (record.values["grad-norm"], record.values["learning-rate"]) == (2.0, 3.0)
    _judge(second, grad_norm=4.0)
    _step(run, metrics, losses={"lm loss": 1.0})
    assert [record.iteration for record in recorder.steps] == [1, 2, 3]
    line = recorder.steps[-1].interval
    assert line is not None
    assert line["number of skipped iterations"] == 1
    assert line["lm loss"] == (6.25 + 1.0) / 2


def test_a_step_that_was_computed_again_is_written_with_its_new_losses() -> None:
    run, metrics, recorder = _begin()
    result = _step(run, metrics, losses={"lm loss": torch.tensor(float("nan"))}, **UNKNOWN)
    _judge(result, losses={"lm loss": torch.tensor(5.0)}, grad_norm=1.0)
    _step(run, metrics)
    _step(run, metrics)
    assert recorder.steps[0].losses == {"lm loss": 5.0}
    line = recorder.steps[-1].interval
    assert line is not None
    assert line["lm loss"] == (5.0 + 6.25 + 6.25) / 3


def test_a_rejected_step_is_never_written() -> None:
    run, metrics, recorder = _begin()
    _step(run, metrics, **UNKNOWN)
    metrics.on_train_end(run)
    metrics.close()
    assert recorder.steps == []
