"""Exits, garbage, synchronization, profiles, progress log, energy."""

from __future__ import annotations

import gc
import json
import logging
import math
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.core import device
from megatron.core.config.errors import ConfigError
from megatron.core.diagnostics.energy import EnergyMonitor, Gpu
from megatron.training.callbacks import default as energy_module
from megatron.training.callbacks import periodic as exit_module
from megatron.training.callbacks import progress_log as progress_module
from megatron.training.callbacks.default import energy_monitor
from megatron.training.callbacks.periodic import ExitConditions, ManualGC, TrainSync, note_best
from megatron.training.callbacks.profiler import (
    MemoryHistory,
    NsysRange,
    TorchProfiler,
)
from megatron.training.callbacks.progress_log import ProgressLog, series_start
from megatron.training.process.signals import StopSignal
from megatron.training.step import evaluate as evaluate_module
from megatron.training.step.evaluate import minutes_over_limit
from megatron.training.step.run import CallbackList, CheckpointEvent, EvalResult
from tests.support.callback_calls import fake_run, step_result


def train(run: Any, callback: Any, last: int = 10) -> None:
    """The loop, with steps that do nothing."""
    callback.on_train_start(run)
    while run.state.iteration < last and run.state.stop_reason is None:
        callback.on_step_start(run)
        run.state.advance(step_result(), 1e12)
        callback.on_step_end(run, step_result())
    callback.on_train_end(run)


# Flags, losses of each validation set at steps 1, 2 ..., and the step of the best one and the
# number of evaluations since then, after each of them.
EVALUATIONS = [
    ("", [[3.0], [2.0], [2.0], [5.0], [1.0]], [(1, 0), (2, 0), (2, 1), (2, 2), (5, 0)]),
    ("--best-metric accuracy", [[0.5], [0.4], [0.6]], [(1, 0), (1, 1), (3, 0)]),
    ("--best-metric margin", [[-2.0], [-3.0], [-1.0]], [(1, 0), (1, 1), (3, 0)]),
    ("", [[math.nan], [2.0], [math.nan], [math.inf]], [(0, 1), (2, 0), (2, 1), (2, 2)]),
    ("", [[1.0, 5.0], [2.0, 3.5], [0.5, 5.5]], [(1, 0), (2, 0), (2, 1)]),
    ("--early-stopping-min-delta 0.5", [[3.0], [2.5], [1.9]], [(1, 0), (2, 1), (3, 0)]),
]


@pytest.mark.parametrize(("flags", "losses", "expected"), EVALUATIONS)
def test_the_best_evaluation_is_remembered(
    flags: str, losses: list[list[float]], expected: list[tuple[int, int]]
) -> None:
    run = fake_run(f"--early-stopping-patience 2 --train-iters 9 {flags}")
    name = flags.split()[-1] if "metric" in flags else "lm loss"
    for sets, (best, since) in zip(losses, expected, strict=True):
        run.state.advance(step_result(), 0)
        note_best(run, [EvalResult(losses={name: value, "else": 0.0}) for value in sets])
        assert (run.state.best_iteration, run.state.evaluations_since_best) == (best, since)
        assert run.finished() == (since == 2)


def test_a_metric_that_is_not_measured_is_refused() -> None:
    run = fake_run("--save-best --save x --best-metric bleu")
    with pytest.raises(ConfigError, match="--best-metric bleu is not measured .* lm loss, ppl$"):
        note_best(run, [EvalResult(losses={"lm loss": 1.0, "ppl": 2.0})])


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Iterations at which the exit conditions saved."""
    iterations: list[int] = []
    monkeypatch.setattr(
        exit_module, "save_last", lambda run: iterations.append(run.state.iteration)
    )
    return iterations


def test_exit_interval_stops_and_saves(saved: list[int]) -> None:
    run = fake_run("--exit-interval 4")
    train(run, ExitConditions(None))
    assert run.state.iteration == 4
    assert run.state.stop_reason == "exiting program at iteration 4"
    assert saved == [4]


def test_without_a_reason_the_run_goes_to_its_end(saved: list[int]) -> None:
    run = fake_run()
    train(run, ExitConditions(None))
    assert run.state.iteration == 10
    assert run.state.stop_reason is None
    assert saved == [], "the end of a whole run saves by itself"


def test_exit_duration_counts_from_the_start_of_the_process(
    saved: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(evaluate_module.time, "time", lambda: now[0])
    run = fake_run("--exit-duration-in-mins 2")
    now[0] = 120.0
    assert minutes_over_limit(run) is None
    now[0] = 150.0
    assert minutes_over_limit(run) == 2.5
    train(run, ExitConditions(None))
    assert run.state.iteration == 1
    assert run.state.stop_reason == "exiting program after 2.5 minutes"
    assert minutes_over_limit(fake_run()) is None, "no limit"


@pytest.mark.feature(
    "Running: exit on a signal, after a duration or at an interval, with a checkpoint"
)
def test_a_signal_stops_after_the_step_and_comes_before_the_interval(saved: list[int]) -> None:
    stop = StopSignal(signal.SIGTERM)
    stop(signal.SIGTERM, None)
    run = fake_run("--exit-interval 1")
    train(run, ExitConditions(stop))
    assert run.state.iteration == 1
    assert run.state.stop_reason == "exiting program after receiving SIGTERM."
    assert saved == [1]


def test_garbage_is_collected_by_hand_at_fixed_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    collected: list[int] = []
    monkeypatch.setattr(gc, "collect", lambda generation=2: collected.append(generation))
    callback = ManualGC()
    run = fake_run("--manual-gc --manual-gc-interval 4")
    try:
        train(run, callback)
        assert not gc.isenabled()
        assert collected == [2, 2, 2], "at the start and at steps 4 and 8"
        callback.on_pause(run, "checkpoint")
        callback.on_pause(run, "evaluation")
        callback.on_resume(run, "evaluation")
        assert collected[3:] == [2, 0]
        quiet = fake_run("--manual-gc --no-manual-gc-eval")
        callback.on_pause(quiet, "evaluation")
        callback.on_resume(quiet, "evaluation")
        assert len(collected) == 5
    finally:
        callback.close()
    assert gc.isenabled()


def test_the_device_is_waited_for_every_so_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    run = fake_run()
    waited: list[int] = []
    monkeypatch.setattr(device, "synchronize", lambda: waited.append(run.state.iteration))
    train(run, TrainSync(4))
    assert waited == [4, 8]


def traced_steps(folder: Path) -> list[str]:
    """Names of the profiler's steps in the only trace under ``folder``."""
    (path,) = folder.glob("rank3*.json")
    events = json.loads(path.read_text())["traceEvents"]
    return sorted({e["name"] for e in events if e.get("name", "").startswith("ProfilerStep")})


@pytest.mark.parametrize(
    ("start", "end", "steps"),
    [
        pytest.param(2, 4, 2, id="inside"),
        pytest.param(0, 1, 1, id="first step"),
        pytest.param(8, 99, 3, id="beyond the end: two steps and what follows them"),
    ],
)
@pytest.mark.filterwarnings("ignore:Profiler won't be using warmup")
@pytest.mark.feature("Logging: torch profiler and nsys ranges over chosen steps and ranks")
def test_torch_profiler_covers_the_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: int, end: int, steps: int
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    run = fake_run(
        f"--profile --use-pytorch-profiler --profile-step-start {start} --profile-step-end {end} "
        f"--tensorboard-dir {tmp_path}"
    )
    callback = TorchProfiler(rank=3)
    train(run, callback)
    callback.close()
    assert len(traced_steps(tmp_path)) == steps


def test_a_run_resumed_behind_the_window_is_not_profiled(tmp_path: Path) -> None:
    run = fake_run(f"--profile --use-pytorch-profiler --tensorboard-dir {tmp_path}")
    run.state.iteration = 12
    train(run, TorchProfiler(rank=0), last=14)
    assert list(tmp_path.iterdir()) == []


def test_a_trace_that_cannot_be_written_does_not_end_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "tensorboard"
    run = fake_run(f"--profile --use-pytorch-profiler --tensorboard-dir {folder}")
    train(run, TorchProfiler(rank=0), last=13)
    assert run.state.iteration == 13
    assert "no profile of rank0: Can't create directory" in caplog.text


def test_nsys_sees_the_same_window(monkeypatch: pytest.MonkeyPatch) -> None:
    run = fake_run("--profile --profile-step-start 3 --profile-step-end 5")
    calls: list[tuple[str, int]] = []

    @contextmanager
    def profiler_range() -> Iterator[None]:
        calls.append(("start", run.state.iteration))
        yield
        calls.append(("stop", run.state.iteration))

    monkeypatch.setattr(device, "profiler_range", profiler_range)
    callback = NsysRange()
    train(run, callback)
    callback.close()
    assert calls == [("start", 3), ("stop", 5)]


def test_memory_history_is_written_at_each_line(monkeypatch: pytest.MonkeyPatch) -> None:
    run = fake_run("--record-memory-history --memory-snapshot-path s.pickle --log-interval 5")
    calls: list[Any] = []
    monkeypatch.setattr(device, "dump_memory_history", calls.append)
    train(run, MemoryHistory())
    assert calls == ["s.pickle", "s.pickle"]


def test_the_progress_log_is_what_the_reference_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1_900_000_000.0]
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("TZ", "UTC")
    monkeypatch.setattr(progress_module.time, "time", lambda: now[0])
    monkeypatch.setattr(
        progress_module.time, "strftime", lambda fmt, *moment: "2030-03-17 17:46:40"
    )
    monkeypatch.setattr(progress_module.time, "mktime", lambda parsed: 1_900_000_000.0)
    run = fake_run(started_at_s=1_900_000_000.0 - 10.0)
    log = ProgressLog(str(tmp_path), world_size=2)
    train(run, log)
    now[0] += 10.0
    log.on_checkpoint(run, CheckpointEvent(kind="saved", iteration=10))
    log.on_checkpoint(run, CheckpointEvent(kind="deleted", iteration=5))
    head = "2030-03-17 17:46:40\tJob ID: 77\t# GPUs: 2\t"
    assert (tmp_path / "progress.txt").read_text().splitlines() == [
        f"{head}Starting job",
        f"{head}Saved checkpoint\tIteration: 10\tJob throughput: 0.2 TFLOP/s/GPU\t"
        "Cumulative throughput: 0.5 TFLOP/s/GPU\tFloating-point operations: 1.00e+13\t"
        "Tokens (in billions): 0.00",
        f"{head}Deleted checkpoint\tIteration: 5",
    ]


def test_a_series_begins_with_the_first_job_on_as_many_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(progress_module.time, "mktime", lambda parsed: float(parsed.tm_mday))

    def line(day: int, gpus: int, *event: str) -> str:
        return "\t".join([f"2030-01-{day:02d} 00:00:00", "Job ID: 1", f"# GPUs: {gpus}", *event])

    saved = ("Saved checkpoint", "Iteration: 1", "a", "b", "Floating-point operations: 5.00e+15")
    lines = [
        line(1, 8, "Starting job"),
        line(2, 4, "Starting job"),
        line(3, 4, *saved),
        line(4, 8, "Starting job"),
        line(5, 8, "Starting job"),
        "",
    ]
    assert series_start(lines, 8) == (4.0, 5e15)
    assert series_start(lines, 4) is None
    assert series_start([], 8) is None


def test_a_progress_log_that_cannot_be_written_costs_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "save").write_text("a file stands where the folder should")
    log = ProgressLog(str(tmp_path / "save"), world_size=1)
    run, callbacks = fake_run(), CallbackList([log])
    with caplog.at_level(logging.WARNING):
        train(run, callbacks)
        callbacks.on_checkpoint(run, CheckpointEvent(kind="saved", iteration=10))
    assert len([r for r in caplog.records if "progress.txt" in r.getMessage()]) == 1


class FakeNvml:
    """A GPU that has used as many millijoules as ``counter`` says."""

    NVMLError = RuntimeError

    def __init__(self) -> None:
        self.counter = 1000
        self.is_open = False

    def nvmlInit(self) -> None:
        self.is_open = True

    def nvmlShutdown(self) -> None:
        self.is_open = False

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return f"handle of {uuid}"

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        assert handle == "handle of GPU-1"
        return self.counter


def test_energy_leaves_out_pauses() -> None:
    nvml = FakeNvml()
    meter = EnergyMonitor()
    meter._gpu = Gpu(nvml, "GPU-1", "--log-energy")
    meter.resume()
    nvml.counter += 500
    meter.pause()
    nvml.counter += 10_000
    meter.resume()
    nvml.counter += 1500
    assert meter.lap() == 2.0
    nvml.counter += 3000
    assert meter.lap() == 3.0
    assert meter.get_total() == 5.0
    meter.shutdown()
    assert not nvml.is_open


def test_energy_is_not_measured_where_nothing_counts(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level(logging.WARNING):
        assert energy_monitor() is None
    assert caplog.records[-1].getMessage().startswith("--log-energy is without effect: the CPU")
    monkeypatch.setattr(energy_module, "device", SimpleNamespace(is_cuda=lambda: True))
    monkeypatch.setattr(energy_module, "available", lambda package: False)
    with caplog.at_level(logging.WARNING):
        assert energy_monitor() is None
    assert "pip install nvidia-ml-py" in caplog.records[-1].getMessage()
