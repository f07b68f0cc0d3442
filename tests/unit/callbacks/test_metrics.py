"""One number, one value: console, TensorBoard, W&B and the metrics file say the same."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron.core.diagnostics import timers as timers_module
from megatron.training.callbacks import metrics as metrics_module
from megatron.training.callbacks import trackers
from megatron.training.callbacks.metrics import Metrics
from megatron.training.callbacks.sinks import (
    ConsoleSink,
    EvalRecord,
    MetricsFileSink,
    Sink,
    StepRecord,
    TensorBoardSink,
    open_sink,
)
from megatron.training.callbacks.trackers import TrackerSink
from megatron.training.step.run import CallbackList, EvalResult
from tests.support.callback_calls import fake_run, step_result
from tests.support.log_parser import TrainingLine, ValidationLine, parse_log


class Recorder(Sink):
    """Keeps the records."""

    name = "recorder"

    def __init__(self) -> None:
        self.steps: list[StepRecord] = []
        self.evals: list[EvalRecord] = []

    def write_step(self, record: StepRecord) -> None:
        self.steps.append(record)

    def write_eval(self, record: EvalRecord) -> None:
        self.evals.append(record)


def sinks_of(*makers: Callable[[], Sink]) -> list[Sink]:
    sinks: list[Sink] = []
    for make in makers:
        open_sink(sinks, "a sink", make)
    return sinks


def step(run: Any, metrics: Metrics, **changes: Any) -> None:
    """What the loop does behind a step."""
    result = step_result(**changes)
    run.state.advance(result, 0.0)
    metrics.on_step_end(run, result)


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """tag -> [(step, value)] of a TensorBoard folder, as its own reader shows them."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {
        tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]
    }


@pytest.mark.feature("Logging: console, TensorBoard and a JSON-lines file show the same numbers")
def test_all_places_get_the_same_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_module, "known_peak", lambda name: 1e9)
    run = fake_run(
        f"--log-throughput --log-params-norm --log-num-zeros-in-grad "
        f"--tensorboard-dir {tmp_path / 'tb'} --log-validation-ppl-to-tensorboard"
    )
    recorder = Recorder()
    metrics = Metrics(
        sinks_of(
            ConsoleSink,
            lambda: MetricsFileSink(str(tmp_path / "m.jsonl"), 0),
            lambda: TensorBoardSink(run.config.logging, {"lr": 1e-3}, 0),
            lambda: recorder,
        )
    )
    metrics.on_train_start(run)
    for loss in (6.25, -0.5):
        step(run, metrics, losses={"lm loss": torch.tensor(loss)}, num_zeros=12, params_norm=13.195)
    metrics.on_eval_end(run, EvalResult(losses={"lm loss": 2.0}))
    metrics.on_train_end(run)
    metrics.close()

    lines = list(parse_log(capsys.readouterr().out.splitlines()))
    assert [type(line) for line in lines] == [TrainingLine, TrainingLine, ValidationLine]
    file = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    board = scalars(tmp_path / "tb")
    for i, (record, line) in enumerate(zip(recorder.steps, file[:2], strict=True)):
        console = lines[i]
        assert isinstance(console, TrainingLine)
        assert record.interval is not None
        assert list(console.values) == list(record.interval) == list(line["interval"])
        for label, value in record.interval.items():
            assert line["interval"][label] == value
            assert console.values[label] == pytest.approx(value, rel=1e-3, abs=0.06)
        for tag, value in {**record.losses, **record.values}.items():
            assert line[tag] == value
            assert board[tag][i] == (i + 1, pytest.approx(value))
            if f"{tag} vs samples" in board:
                assert board[f"{tag} vs samples"][i] == (8 * (i + 1), pytest.approx(value))
    assert {"throughput per GPU (TFLOP/s/GPU)", "tokens/s", "MFU"} <= set(file[0]["interval"])
    evaluation = {"lm loss validation": 2.0, "lm loss validation ppl": pytest.approx(7.389056)}
    for tag, value in evaluation.items():
        assert file[2][tag] == value
        assert board[tag] == [(2, value)]
        assert board[f"{tag} vs samples"] == [(16, value)]


@pytest.mark.feature("Logging: Megatron-LM's TensorBoard tags")
def test_tags_are_those_of_the_reference(tmp_path: Path) -> None:
    run = fake_run(f"--tensorboard-dir {tmp_path} --log-params-norm --log-num-zeros-in-grad")
    metrics = Metrics(sinks_of(lambda: TensorBoardSink(run.config.logging, {"seed": 1}, 0)))
    metrics.on_train_start(run)
    step(run, metrics, num_zeros=0, params_norm=13.2)
    metrics.on_eval_end(run, EvalResult(losses={"lm loss": 2.0}))
    metrics.close()
    plain = [
        "learning-rate",
        "batch-size",
        "lm loss",
        "loss-scale",
        "grad-norm",
        "num-zeros",
        "params-norm",
        "lm loss validation",
    ]
    assert set(scalars(tmp_path)) == {*plain, *(f"{tag} vs samples" for tag in plain)}
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert events.Tags()["tensors"] == ["seed/text_summary"]


def test_options_add_and_remove_tags(tmp_path: Path) -> None:
    run = fake_run(
        f"--tensorboard-dir {tmp_path} --no-log-loss-scale-to-tensorboard --log-throughput "
        "--log-world-size-to-tensorboard --log-memory-to-tensorboard --log-timers-to-tensorboard "
    )
    metrics = Metrics(sinks_of(lambda: TensorBoardSink(run.config.logging, {}, 0)))
    metrics.on_train_start(run)
    run.timers("optimizer", log_level=0).start()
    run.timers("optimizer").stop()
    step(run, metrics, decoupled_learning_rate=2e-3)
    metrics.close()
    tags = set(scalars(tmp_path))
    assert {
        "world-size",
        "world-size vs samples",
        "mem-reserved-bytes",
        "mem-allocated-bytes",
        "mem-max-allocated-bytes",
        "mem-allocated-count",
        "optimizer-time",
        "iteration-time",
        "throughput",
        "tokens/s",
        "decoupled-learning-rate",
    } <= tags
    assert not {"loss-scale", "decoupled-learning-rate vs samples"} & tags


def test_the_line_is_a_mean_over_the_steps_with_an_update(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(timers_module.time, "perf_counter", lambda: now[0])
    run = fake_run("--log-interval 4 --tensorboard-log-interval 100")
    recorder = Recorder()
    metrics = Metrics(sinks_of(lambda: recorder))
    metrics.on_train_start(run)
    for loss, skipped, nan in ((4.0, False, False), (9.0, True, True), (2.0, False, False)):
        now[0] += 0.5
        step(run, metrics, losses={"lm loss": loss}, skipped=skipped, nan=nan)
    now[0] += 0.5
    step(run, metrics, losses={"lm loss": 0.0}, loss_scale=512.0)
    (record,) = recorder.steps
    assert record.iteration == 4
    assert record.losses == record.values == {}, "not due at this step"
    assert record.interval == {
        "consumed samples": 32,
        "elapsed time per iteration (ms)": pytest.approx(500.0),
        "learning rate": 1e-3,
        "global batch size": 8,
        "lm loss": 2.0,
        "loss scale": 512.0,
        "grad norm": 0.5,
        "number of skipped iterations": 1,
        "number of nan iterations": 1,
    }


def test_an_interval_without_an_update_shows_the_losses_of_skipped_steps() -> None:
    run = fake_run()
    recorder = Recorder()
    metrics = Metrics(sinks_of(lambda: recorder))
    metrics.on_train_start(run)
    step(run, metrics, losses={"lm loss": float("inf")}, skipped=True, nan=True)
    assert recorder.steps[0].interval is not None
    assert recorder.steps[0].interval["lm loss"] == float("inf")


def test_pauses_do_not_count_as_training_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(timers_module.time, "perf_counter", lambda: now[0])
    run = fake_run("--log-interval 2")
    recorder = Recorder()
    callbacks = CallbackList([Metrics(sinks_of(lambda: recorder))])
    callbacks.on_train_start(run)
    for _ in range(2):
        now[0] += 1.0
        result = step_result()
        run.state.advance(result, 0.0)
        callbacks.on_step_end(run, result)
        with callbacks.paused(run, "evaluation"):
            now[0] += 100.0
    callbacks.on_train_end(run)
    with callbacks.paused(run, "evaluation"):  # behind the loop nothing is measured any more
        now[0] += 100.0
    (shown,) = [r.interval for r in recorder.steps if r.interval is not None]
    assert shown["elapsed time per iteration (ms)"] == pytest.approx(1000.0)


def test_throughput_and_mfu_follow_from_flops_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(timers_module.time, "perf_counter", lambda: now[0])
    run = fake_run("--log-throughput")
    recorder = Recorder()
    metrics = Metrics(sinks_of(lambda: recorder))
    monkeypatch.setattr(metrics_module, "known_peak", lambda name: 1e9)
    metrics.on_train_start(run)
    now[0] += 2.0
    step(run, metrics)
    shown = recorder.steps[0].interval
    assert shown is not None
    reference_flops = 692060160.0 / 5  # 8 samples; see test_flops
    assert shown["throughput per GPU (TFLOP/s/GPU)"] == pytest.approx(reference_flops / 2e12)
    assert shown["tokens/s"] == pytest.approx(256.0)
    causal_flops = reference_flops + 6 * 8 * 64 * 2 * 2 * 32 * 0.5  # (s + 1) / 2 keys, not s / 2
    assert shown["MFU"] == pytest.approx(100 * causal_flops / 2e9)


def test_the_timers_block_and_the_memory_estimate_follow_the_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = fake_run("--log-timers-to-tensorboard")
    metrics = Metrics(sinks_of(ConsoleSink))
    metrics.on_train_start(run)
    for _ in range(2):
        run.timers("forward-backward", log_level=0).start()
        run.timers("forward-backward").stop()
        step(run, metrics)
    out = capsys.readouterr().out
    lines = [line.split(" ")[0 if line.startswith(("(", "T")) else -1] for line in out.splitlines()]
    assert len(re.findall(r"^    forward-backward \.+: \(\d+\.\d\d, \d+\.\d\d\)$", out, re.M)) == 2
    assert out.count("Theoretical memory footprints: weight and optimizer=") == 1
    assert lines[1] == "(min,"


def test_other_ranks_write_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    run = fake_run(is_last_loss_rank=False, is_rank_0=False)
    recorder = Recorder()
    metrics = Metrics(sinks_of(lambda: recorder))
    metrics.on_train_start(run)
    step(run, metrics)
    metrics.on_eval_end(run, EvalResult(losses={}))
    assert not recorder.steps
    assert not recorder.evals
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("[Rank 0] (after 1 iterations) memory (MB) | allocated: ")


def test_the_memory_of_gpus_is_printed_at_its_own_interval(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = fake_run("--log-memory-interval 3 --log-interval 100")
    metrics = Metrics(sinks_of(Recorder))
    metrics.on_train_start(run)
    for _ in range(7):
        step(run, metrics)
    lines = [line for line in capsys.readouterr().out.splitlines() if "memory (MB)" in line]
    assert [line.split(")")[0] for line in lines] == [
        f"[Rank 0] (after {iteration} iterations" for iteration in (3, 6)
    ]


def test_a_place_that_fails_costs_one_warning_and_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Full(Recorder):
        name = "metrics file"

        def write_step(self, record: StepRecord) -> None:
            raise OSError(28, "No space left on device")

    def unwritable() -> Sink:
        raise PermissionError(13, "Permission denied: '/x'")

    recorder = Recorder()
    sinks = sinks_of(Full, unwritable, lambda: recorder)
    run = fake_run()
    metrics = Metrics(sinks)
    metrics.on_train_start(run)
    with caplog.at_level(logging.WARNING):
        step(run, metrics)
        step(run, metrics)
    assert len(recorder.steps) == 2
    assert [r.getMessage() for r in caplog.records if "Errno 28" in r.getMessage()] == [
        "a sink is switched off for the rest of this run, training goes on: "
        "OSError: [Errno 28] No space left on device"
    ]


def test_the_evaluation_at_the_end_is_written_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It repeats that of the last step, which is in each file already; the console shows both."""
    logged: list[dict[str, Any]] = []
    fake = SimpleNamespace(
        init=lambda **_: None,
        log=lambda values, step: logged.append(values),
        finish=lambda: None,
        run=SimpleNamespace(id="1"),
    )
    monkeypatch.setattr(trackers, "require", lambda package, wanted_by: fake)
    run = fake_run(
        f"--tensorboard-dir {tmp_path / 'tb'} --wandb-project p --wandb-exp-name e "
        f"--wandb-save-dir {tmp_path}"
    )
    metrics = Metrics(
        sinks_of(
            ConsoleSink,
            lambda: MetricsFileSink(str(tmp_path / "m.jsonl"), 0),
            lambda: TensorBoardSink(run.config.logging, {}, 0),
            lambda: TrackerSink("wandb", run, {}),
        )
    )
    losses = {"lm loss": 2.0}
    metrics.on_train_start(run)
    step(run, metrics)
    metrics.on_eval_end(run, EvalResult(losses=losses))
    step(run, metrics)
    metrics.on_eval_end(run, EvalResult(losses=losses, set_index=0))
    metrics.on_train_end(run)
    metrics.on_eval_end(run, EvalResult(losses=losses, set_index=0, is_final=True))
    metrics.on_eval_end(run, EvalResult(losses=losses, set_index=1, is_final=True))
    metrics.on_eval_end(run, EvalResult(losses=losses, split="test", is_final=True))
    metrics.close()

    board = scalars(tmp_path / "tb")
    assert board["lm loss validation"] == [(1, 2.0)]
    for tag in ("lm loss validation-0", "lm loss validation-1", "lm loss test"):
        assert board[tag] == [(2, 2.0)]
        assert board[f"{tag} vs samples"] == [(16, 2.0)]
        assert sum(tag in values for values in logged) == 1
    file = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert sum("lm loss validation-0" in line for line in file) == 1
    shown = [line for line in parse_log(capsys.readouterr().out.splitlines())]
    assert sum(isinstance(line, ValidationLine) for line in shown) == 5


def test_losses_of_single_layers_are_in_the_files_and_not_in_the_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = fake_run(f"--tensorboard-dir {tmp_path / 'tb'}")
    metrics = Metrics(
        sinks_of(
            ConsoleSink,
            lambda: MetricsFileSink(str(tmp_path / "m.jsonl"), 0),
            lambda: TensorBoardSink(run.config.logging, {}, 0),
        )
    )
    metrics.on_train_start(run)
    tag = "moe/load_balancing_loss_layer_1"
    step(run, metrics, layer_losses={tag: torch.tensor(1.5)})
    metrics.close()
    (line,) = parse_log(capsys.readouterr().out.splitlines())
    assert isinstance(line, TrainingLine)
    assert not any("layer" in label for label in line.values)
    (stored,) = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert stored[tag] == 1.5
    assert tag not in stored["interval"]
    board = scalars(tmp_path / "tb")
    assert board[tag] == [(1, 1.5)]
    assert f"{tag} vs samples" not in board


def test_a_step_is_written_after_the_next_one_was_launched_or_before_a_pause() -> None:
    """Reading the losses at the end of their step would leave the device idle."""
    recorder = Recorder()
    run = fake_run("--log-interval 4")
    metrics = Metrics(sinks_of(lambda: recorder))
    metrics.on_train_start(run)
    written = []
    for _ in range(2):
        step(run, metrics)
        written.append(len(recorder.steps))
    metrics.on_pause(run, "checkpoint")
    written.append(len(recorder.steps))
    metrics.on_resume(run, "checkpoint")
    for _ in range(2):  # the last one has a line
        step(run, metrics)
        written.append(len(recorder.steps))
    assert written == [0, 1, 2, 2, 4]
