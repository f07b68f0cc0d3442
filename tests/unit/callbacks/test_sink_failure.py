"""No log ends a run: the one that fails is named, switched off, and training goes on."""

from __future__ import annotations

import logging
import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.core import device
from megatron.core.diagnostics.energy import EnergyMonitor, Gpu
from megatron.training.callbacks import default, trackers
from megatron.training.callbacks import straggler as straggler_module
from megatron.training.callbacks.default import default_callbacks
from megatron.training.callbacks.profiler import MemoryHistory
from megatron.training.callbacks.straggler import gpu_reader, report
from megatron.training.step.run import Callback, CallbackList, CheckpointEvent
from tests.support.callback_calls import fake_run, step_result


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default.dist, "get_rank", lambda: 0)


def switched_off(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "is switched off" in r.getMessage()]


def logging_of(run: Any) -> CallbackList:
    """The callbacks of ``run`` that log."""
    kinds = ("Metrics", "ProgressLog")
    return CallbackList(c for c in default_callbacks(run) if type(c).__name__ in kinds)


def steps(run: Any, callbacks: CallbackList, between: Callable[[], object]) -> None:
    """Three steps and a checkpoint, with ``between`` after the first step."""
    callbacks.on_train_start(run)
    for number in range(3):
        callbacks.on_step_start(run)
        run.state.advance(step_result(), 0.0)
        callbacks.on_step_end(run, step_result())
        if number == 0:
            between()
    callbacks.on_checkpoint(run, CheckpointEvent(kind="saved", iteration=3))
    callbacks.on_train_end(run)
    callbacks.close()
    assert run.state.iteration == 3


@pytest.mark.feature("Logging: a log that cannot be written is switched off with one warning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--tensorboard-dir {0}", "TensorBoard log {0}"),
        ("--log-progress --save {0}", "progress log {0}/progress.txt"),
    ],
)
def test_a_folder_that_vanishes_costs_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, flags: str, named: str
) -> None:
    folder = tmp_path / "logs"
    run = fake_run(flags.format(folder))

    def vanish() -> None:
        shutil.rmtree(folder)
        folder.touch()  # nor can it be made again

    steps(run, logging_of(run), vanish)
    (warning,) = switched_off(caplog)
    assert warning.startswith(f"{named.format(folder)} is switched off")


def test_a_full_disk_switches_the_metrics_file_off(caplog: pytest.LogCaptureFixture) -> None:
    run = fake_run("--metrics-file /dev/full")
    steps(run, logging_of(run), lambda: None)
    (warning,) = switched_off(caplog)
    assert warning.startswith("metrics file /dev/full is switched off")


def test_a_damaged_progress_log_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "progress.txt").write_text("a\tb\tc\td\n")
    run = fake_run(f"--log-progress --save {tmp_path}")
    steps(run, logging_of(run), lambda: None)
    (warning,) = switched_off(caplog)
    assert "damaged line" in warning


@pytest.mark.parametrize("call", ["init", "log", "finish"])
def test_whatever_wandb_raises_switches_it_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise LookupError("the service has ended")

    calls: dict[str, Any] = dict.fromkeys(("init", "log", "finish"), lambda *a, **k: None)
    fake = SimpleNamespace(run=SimpleNamespace(id="1"), **{**calls, call: fail})
    monkeypatch.setattr(trackers, "require", lambda *_: fake)
    run = fake_run(f"--wandb-project p --wandb-exp-name e --wandb-save-dir {tmp_path}")
    steps(run, logging_of(run), lambda: None)
    (warning,) = switched_off(caplog)
    assert warning.startswith("the log in Weights & Biases is switched off")
    assert "LookupError: the service has ended" in warning


def test_a_memory_history_that_cannot_be_written_is_switched_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(path: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(device, "dump_memory_history", full)
    run = fake_run("--memory-snapshot-path s.pickle")
    steps(run, CallbackList([MemoryHistory()]), lambda: None)
    (warning,) = switched_off(caplog)
    assert warning.startswith("memory history s.pickle is switched off")


@pytest.mark.parametrize("closed", ["1>&-", "0<&- 1>&- 2>&-"])
def test_output_that_was_closed_before_the_start_is_lost_and_goes_into_no_file(closed: str) -> None:
    lines = (
        "import os, sys",
        "from megatron.training.process.rank_print import survive_lost_output",
        "survive_lost_output()",
        "opened = os.open('/dev/zero', os.O_RDONLY)",
        "for stream in (sys.stdout, sys.stderr): print('x', file=stream); stream.isatty()",
        "assert opened > 2",
    )
    command = f'exec "$0" -c "$1" {closed}'
    subprocess.run(["sh", "-c", command, sys.executable, "\n".join(lines)], check=True)


class LostGpu(SimpleNamespace):
    """NVML with a driver that fails from some call on."""

    class NVMLError(Exception):
        pass

    def __init__(self, good_calls: int) -> None:
        super().__init__(good_calls=good_calls, NVML_TEMPERATURE_GPU=0, NVML_CLOCK_SM=1)

    def __getattr__(self, name: str) -> Any:
        def call(*_args: Any) -> int:
            self.good_calls -= 1
            if self.good_calls < 0:
                raise self.NVMLError("GPU is lost")
            return 7000

        return call


@pytest.mark.parametrize("good_calls", [0, 1, 2, 3])
def test_a_gpu_that_is_lost_has_no_energy(
    caplog: pytest.LogCaptureFixture, good_calls: int
) -> None:
    with caplog.at_level(logging.WARNING):
        meter = EnergyMonitor()
        meter._gpu = Gpu(LostGpu(good_calls), "GPU-1", "--log-energy")
        meter.resume()
        assert math.isnan(meter.lap())
        meter.pause()
        meter.resume()
        meter.shutdown()
    (warning,) = switched_off(caplog)
    assert "(--log-energy)" in warning
    assert "GPU is lost" in warning


def test_a_gpu_that_is_lost_has_no_row_in_the_straggler_report(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_device = SimpleNamespace(is_cuda=lambda: True, uuid=lambda: "GPU-1")
    monkeypatch.setattr(straggler_module, "device", fake_device)
    monkeypatch.setattr(straggler_module, "available", lambda package: True)
    monkeypatch.setattr(straggler_module, "require", lambda *_: LostGpu(3))
    readings = gpu_reader()()
    assert readings[0] == 7.0
    assert all(math.isnan(value) for value in readings[1:])
    lost = [5.0, math.nan, *[math.nan] * 3, 0.5, 2.5]
    (line,) = report([lost, [4.0, 300.0, 60, 97, 1700, 0.5, 2.5]], 1)
    assert "MnPwr/Rnk: 300.0W/1 | MxPwr/Rnk: 300.0W/1" in line


def test_an_error_of_any_other_callback_ends_the_run() -> None:
    class Broken(Callback):
        def on_step_start(self, run: Any) -> None:
            raise OSError("this callback writes no log")

    with pytest.raises(OSError, match="writes no log"):
        CallbackList([Broken()]).on_step_start(fake_run())


def test_a_mistake_in_a_sink_is_seen(tmp_path: Path) -> None:
    run = fake_run(f"--metrics-file {tmp_path}/m.jsonl")
    callbacks = logging_of(run)
    callbacks.on_train_start(run)
    with pytest.raises(TypeError):
        callbacks.on_eval_end(
            run,
            SimpleNamespace(
                losses={"a": object()}, split="validation", set_index=None, is_final=False
            ),
        )
