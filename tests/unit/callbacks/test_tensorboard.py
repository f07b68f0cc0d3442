"""TensorBoard after a resume: every step once, also over samples."""

from __future__ import annotations

from pathlib import Path

import pytest
from tensorboard.summary.writer import event_file_writer
from tensorboard.summary.writer.event_file_writer import AtomicCounter

from megatron.training.callbacks.records import StepRecord
from megatron.training.callbacks.tensorboard import History, TensorBoardSink
from tests.support.callback_calls import run_config
from tests.unit.callbacks.test_metrics import scalars


@pytest.fixture(autouse=True)
def files_of_one_second_sort_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorBoard reads files in the order of their names, which end in a count: 10 before 9."""
    monkeypatch.setattr(event_file_writer, "_global_uid", AtomicCounter(0))


def log_steps(folder: Path, first: int, last: int, loss: float) -> None:
    """A run that starts behind step ``first`` - 1 and logs up to ``last``; 8 samples a step."""
    config = run_config(f"--tensorboard-dir {folder}").logging
    sink = TensorBoardSink(config, {"seed": 1}, first - 1, 8 * (first - 1))
    for iteration in range(first, last + 1):
        sink.write_step(
            StepRecord(
                iteration=iteration,
                train_iters=10,
                consumed_samples=8 * iteration,
                losses={"lm loss": loss},
                values={"grad-norm": loss},
                interval=None,
            )
        )
    sink.close()


def test_steps_behind_the_checkpoint_are_superseded(tmp_path: Path) -> None:
    log_steps(tmp_path, 1, 8, loss=1.0)
    log_steps(tmp_path, 6, 10, loss=2.0)
    for tag in ("lm loss", "grad-norm"):
        expected = [(i, 1.0 if i <= 5 else 2.0) for i in range(1, 11)]
        assert scalars(tmp_path)[tag] == expected
        assert scalars(tmp_path)[f"{tag} vs samples"] == [(8 * i, v) for i, v in expected]


def test_a_resume_that_lost_nothing_marks_nothing(tmp_path: Path) -> None:
    log_steps(tmp_path, 1, 5, loss=1.0)
    history = History.read(str(tmp_path), 5, 40)
    assert not history.is_superseded
    log_steps(tmp_path, 6, 7, loss=2.0)
    assert scalars(tmp_path)["lm loss vs samples"] == [
        (8 * i, 1.0 if i <= 5 else 2.0) for i in range(1, 8)
    ]


def test_a_record_that_a_kill_cut_off_is_not_minded(tmp_path: Path) -> None:
    log_steps(tmp_path, 1, 8, loss=1.0)
    (path,) = tmp_path.glob("*tfevents*")
    path.write_bytes(path.read_bytes()[:-7])
    assert History.read(str(tmp_path), 5, 40).is_superseded


def test_an_empty_folder_has_no_history(tmp_path: Path) -> None:
    assert not History.read(str(tmp_path / "none"), 0, 0).is_superseded
