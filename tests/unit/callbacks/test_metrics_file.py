"""--metrics-file: strict JSON, whole lines, no duplicates after a resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.training.callbacks.sinks import EvalRecord, MetricsFileSink, StepRecord


def write_step(sink: MetricsFileSink, iteration: int, loss: float = 1.0) -> None:
    sink.write_step(
        StepRecord(
            iteration=iteration,
            train_iters=10,
            consumed_samples=8 * iteration,
            losses={"lm loss": loss},
            values={"learning-rate": 1e-3},
            interval={"lm loss": loss},
        )
    )


def write_eval(sink: MetricsFileSink, iteration: int, *, is_final: bool = False) -> None:
    sink.write_eval(
        EvalRecord(
            iteration=iteration,
            consumed_samples=8 * iteration,
            losses={"lm loss": 2.0},
            split="validation",
            suffix="",
            is_final=is_final,
        )
    )


def read(path: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(s, parse_constant=refuse) for s in path.read_text().splitlines()]


def test_a_line_holds_kind_place_numbers_and_the_interval(tmp_path: Path) -> None:
    sink = MetricsFileSink(str(tmp_path / "deep" / "m.jsonl"), 0)
    write_step(sink, 1)
    write_eval(sink, 1)
    step, evaluation = read(tmp_path / "deep" / "m.jsonl")
    assert step.pop("time") > 0
    assert step == {
        "kind": "step",
        "iteration": 1,
        "consumed_samples": 8,
        "lm loss": 1.0,
        "learning-rate": 1e-3,
        "interval": {"lm loss": 1.0},
    }
    assert evaluation["kind"] == "validation"
    assert evaluation["lm loss validation"] == 2.0
    assert evaluation["lm loss validation ppl"] == pytest.approx(7.389056)
    assert evaluation["final"] is False


def test_what_json_does_not_know_becomes_a_string(tmp_path: Path) -> None:
    sink = MetricsFileSink(str(tmp_path / "m.jsonl"), 0)
    for iteration, loss in enumerate((float("nan"), float("inf"), float("-inf")), start=1):
        write_step(sink, iteration, loss)
    lines = read(tmp_path / "m.jsonl")
    assert [line["lm loss"] for line in lines] == ["NaN", "Infinity", "-Infinity"]
    assert lines[0]["interval"] == {"lm loss": "NaN"}


@pytest.mark.feature("Logging: a resumed run continues its metrics without duplicates")
def test_a_resumed_run_continues_without_duplicates(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    killed = MetricsFileSink(str(path), 0)
    for iteration in range(1, 9):
        write_step(killed, iteration)
        if iteration == 5:
            write_eval(killed, 5)
    with path.open("ab") as file:
        file.write(b'{"kind": "step", "iterati')  # the kill came in the middle of a line
    resumed = MetricsFileSink(str(path), 5)
    for iteration in range(6, 11):
        write_step(resumed, iteration)
    lines = read(path)
    assert [s["iteration"] for s in lines if s["kind"] == "step"] == list(range(1, 11))
    assert [s["iteration"] for s in lines if s["kind"] == "validation"] == [5]


def test_evaluations_at_the_end_are_repeated_by_a_resumed_run(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    first = MetricsFileSink(str(path), 0)
    write_step(first, 10)
    write_eval(first, 10)
    write_eval(first, 10, is_final=True)
    MetricsFileSink(str(path), 10)
    assert [(s["kind"], s.get("final")) for s in read(path)] == [
        ("step", None),
        ("validation", False),
    ]


def test_a_whole_file_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    write_step(MetricsFileSink(str(path), 0), 5)
    before = path.read_bytes()
    MetricsFileSink(str(path), 5)
    assert path.read_bytes() == before


def test_a_run_from_the_beginning_sets_an_older_file_aside(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    write_step(MetricsFileSink(str(path), 0), 5)
    write_step(MetricsFileSink(str(path), 0), 1)
    assert [s["iteration"] for s in read(path)] == [1]
    assert [s["iteration"] for s in read(tmp_path / "m.jsonl.previous")] == [5]


def test_a_folder_is_refused_and_stays_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "folder" / "inside").mkdir(parents=True)
    for iteration in (0, 5):
        with pytest.raises(IsADirectoryError):
            MetricsFileSink(str(tmp_path / "folder"), iteration)
    assert (tmp_path / "folder" / "inside").is_dir()


def test_a_resumed_run_does_not_cut_a_file_that_holds_something_else(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text("a line of a log\nanother\n")
    write_step(MetricsFileSink(str(path), 5), 6)
    assert (tmp_path / "train.log.previous").read_text() == "a line of a log\nanother\n"
    assert [s["iteration"] for s in read(path)] == [6]
