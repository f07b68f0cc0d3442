"""Which callbacks a run has, in which order, and that the list calls them so."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from megatron.training.callbacks import default
from megatron.training.callbacks.default import default_callbacks
from megatron.training.step.run import Callback, CallbackList, CheckpointEvent, EvalResult
from tests.support.callback_calls import fake_run, step_result


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default.dist, "get_rank", lambda: 0)


def names(flags: str, **changes: object) -> list[str]:
    callbacks = default_callbacks(fake_run(flags, **changes))
    callbacks.close()
    return [type(callback).__name__ for callback in callbacks]


def test_a_plain_run_logs_evaluates_saves_and_may_end() -> None:
    assert names("") == [
        "Metrics",
        "EvaluationCallback",
        "CheckpointCallback",
        "ExitConditions",
    ]


def test_everything_asked_for_stands_in_its_place(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        found = names(
            f"--profile --manual-gc --train-sync-interval 5 --log-progress "
            f"--save {tmp_path} --exit-signal-handler --log-energy "
            f"--tensorboard-dir {tmp_path / 'tb'} --metrics-file {tmp_path / 'm.jsonl'}"
        )
    finally:
        signal.signal(signal.SIGTERM, before)
    assert found == [
        "NsysRange",
        "TrainSync",
        "Metrics",
        "EvaluationCallback",
        "ManualGC",
        "ProgressLog",
        "CheckpointCallback",
        "ExitConditions",
    ]
    assert (tmp_path / "m.jsonl").exists()
    assert list((tmp_path / "tb").glob("*tfevents*"))


def test_only_the_last_rank_opens_files_and_only_rank_0_logs_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(default.dist, "get_rank", lambda: 3)  # --profile-ranks is 0
    found = names(
        f"--log-progress --save {tmp_path} --metrics-file {tmp_path / 'm.jsonl'} --profile",
        is_last_loss_rank=False,
        is_rank_0=False,
    )
    assert found == ["Metrics", "EvaluationCallback", "CheckpointCallback", "ExitConditions"]
    assert list(tmp_path.iterdir()) == []


def test_scripts_find_the_tensorboard_writer(tmp_path: Path) -> None:
    callbacks = default_callbacks(fake_run(f"--tensorboard-dir {tmp_path}"))
    (found,) = callbacks.writers().items()
    assert (found[0], type(found[1]).__name__) == ("tensorboard", "SummaryWriter")
    callbacks.close()


def test_hooks_are_called_in_the_order_of_the_list() -> None:
    calls: list[str] = []

    class Named(Callback):
        def __init__(self, name: str) -> None:
            self.name = name

        def __getattribute__(self, hook: str):  # type: ignore[no-untyped-def]
            if hook.startswith("on_") or hook == "close":
                return lambda *args: calls.append(f"{hook} {self.name}")
            return super().__getattribute__(hook)

    callbacks = CallbackList([Named("a")])
    callbacks.append(Named("b"))
    assert len(callbacks) == 2
    run = fake_run()
    callbacks.on_train_start(run)
    callbacks.on_step_start(run)
    callbacks.on_step_end(run, step_result())
    with callbacks.paused(run, "checkpoint"):
        calls.append("save")
    callbacks.on_checkpoint(run, CheckpointEvent(kind="saved", iteration=1))
    callbacks.on_eval_step_start(run)
    callbacks.on_eval_step_end(run)
    callbacks.on_eval_end(run, EvalResult(losses={}))
    callbacks.on_train_end(run)
    callbacks.close()
    hooks = ["on_train_start", "on_step_start", "on_step_end", "on_pause", "on_resume"]
    hooks += [
        "on_checkpoint",
        "on_eval_step_start",
        "on_eval_step_end",
        "on_eval_end",
        "on_train_end",
        "close",
    ]
    expected = [f"{hook} {name}" for hook in hooks for name in "ab"]
    expected.insert(expected.index("on_resume a"), "save")
    assert calls == expected
