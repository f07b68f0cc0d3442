"""Validation blocks and the progress bar."""

from __future__ import annotations

import io
import math
from pathlib import Path

import pytest

from megatron.training.callbacks import console
from megatron.training.callbacks.console import ProgressBar, terminal, validation_block
from megatron.training.callbacks.records import EvalRecord
from tests.support.callback_calls import fake_run, step_result


def _record(**changes: object) -> EvalRecord:
    fields = {
        "iteration": 100,
        "consumed_samples": 800,
        "losses": {"lm loss": 7.12},
        "split": "validation",
        "suffix": "",
        "is_final": False,
    }
    return EvalRecord(**(fields | changes))  # type: ignore[arg-type]


def test_a_validation_block_has_loss_and_perplexity_between_rules() -> None:
    rule = "-" * 95
    assert validation_block(_record()) == (
        f"{rule}\n validation loss at iteration 100 | lm loss value: 7.120000E+00 | "
        f"lm loss PPL: 1.236450E+03 | \n{rule}"
    )


def test_only_the_loss_of_a_language_model_has_a_perplexity() -> None:
    losses = {"lm loss": 7.12, "reward accuracy": 0.5}
    record = _record(losses=losses)
    assert list(record.perplexities) == ["lm loss"]
    assert "PPL" not in validation_block(_record(losses={"reward": 0.5, "accuracy": 0.5}))
    text = validation_block(record)
    assert "lm loss PPL: 1.236450E+03 | reward accuracy value: 5.000000E-01 | \n" in text


def test_the_last_evaluations_name_their_set_and_several_sets_their_number() -> None:
    final = validation_block(_record(split="test", is_final=True)).splitlines()[1]
    assert final.startswith(" validation loss at iteration 100 on test set | ")
    second = validation_block(_record(suffix="-1")).splitlines()[1]
    assert second.startswith(" validation-1 loss at iteration 100 | ")


def test_perplexity_is_cut_where_it_would_overflow() -> None:
    assert _record(losses={"lm loss": 1e4}).perplexities == {"lm loss": pytest.approx(4.85165e8)}


def test_the_perplexity_of_a_nan_is_a_nan() -> None:
    assert math.isnan(_record(losses={"lm loss": math.nan}).perplexities["lm loss"])


def test_the_bar_stands_only_while_a_step_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    stream = io.StringIO()
    bar, run = ProgressBar(stream), fake_run()
    run.state.iteration = 4
    bar.on_train_start(run)
    bar.on_step_start(run)
    assert stream.getvalue() == "\r[############..................] 4/10\x1b[K"
    now[0] += 90.0
    run.state.iteration += 1
    bar.on_step_end(run, step_result())
    assert stream.getvalue().endswith("\r\x1b[K")
    bar.on_step_start(run)
    assert "] 5/10 0:07:30 left" in stream.getvalue()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_is_drawn_on_a_terminal_unless_asked_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stderr", io.StringIO())
    assert terminal(None) is None
    watched = Terminal()
    monkeypatch.setattr("sys.stderr", watched)
    assert terminal(None) is watched
    assert terminal(True) is watched
    assert terminal(False) is None


def test_a_bar_that_is_asked_for_never_goes_to_a_log_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log_file = io.StringIO()
    monkeypatch.setattr("sys.stderr", log_file)
    monkeypatch.setattr(console, "_TERMINAL", str(tmp_path / "tty"))
    watched = terminal(True)
    assert watched is not None
    bar = ProgressBar(watched)
    bar.on_train_start(fake_run())
    bar.on_step_start(fake_run())
    bar.close()
    assert "/10" in (tmp_path / "tty").read_text()
    assert log_file.getvalue() == ""
    monkeypatch.setattr(console, "_TERMINAL", str(tmp_path / "absent" / "tty"))
    assert terminal(True) is None
    assert "--progress-bar is without effect" in caplog.text
