"""Sections of a run: their order, durations and limits."""

from __future__ import annotations

import os
import signal
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from megatron.core.config.errors import ConfigError
from megatron.training import ft_integration
from megatron.training.callbacks.periodic import Sections
from megatron.training.fault_tolerance import sections
from megatron.training.fault_tolerance.heartbeat import (
    OUT_OF_SECTION,
    STATE_FILE,
    VARIABLE,
    Limits,
    read_heartbeats,
)
from megatron.training.step.run import CallbackList
from tests.support.callback_calls import fake_run, step_result
from tests.support.ranks import run_virtual_ranks


class FakeClient:
    """NVIDIA's client: notes calls.  The real one is used by hand, under its ft_launcher."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.section_timeouts = SimpleNamespace(
            section={"setup": 600.0, "step": 60.0, "checkpointing": None}, out_of_section=90.0
        )

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self.calls.append((name, *args))

    def sections(self) -> str:
        names = {"start_section": "+", "end_section": "-"}
        return " ".join(names[c[0]] + c[1] for c in self.calls if c[0] in names)


@pytest.fixture
def monitor(monkeypatch: pytest.MonkeyPatch) -> Iterator[sections.Monitor]:
    monkeypatch.setattr(sections, "monitor", sections.Monitor())
    yield sections.monitor
    sections.collective_tracer.record.board = None


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> FakeClient:
    fake = FakeClient()
    package = SimpleNamespace(RankMonitorClient=lambda: fake)
    monkeypatch.setattr(sections, "require", lambda name, flag: package)
    monkeypatch.setenv("FT_RANK_MONITOR_IPC_SOCKET", "/nowhere")
    return fake


def train(callbacks: CallbackList, steps: int) -> None:
    """Call the hooks as a run does: an evaluation and a save after the second step."""
    run = fake_run()
    for number in range(1, steps + 1):
        callbacks.on_step_start(run)
        run.state.advance(step_result(), 0.0)
        callbacks.on_step_end(run, step_result())
        if number == 2:
            with callbacks.paused(run, "evaluation"):
                for _ in range(2):
                    callbacks.on_eval_step_start(run)
                    callbacks.on_eval_step_end(run)
            with callbacks.paused(run, "checkpoint"):
                pass
    callbacks.on_train_end(run)
    callbacks.close()


def test_sections_reach_nvidias_client_in_order(
    monitor: sections.Monitor, client: FakeClient, tmp_path: Path
) -> None:
    monitor.enable(str(tmp_path), learns=True)
    train(CallbackList([Sections()]), 3)
    assert client.sections() == (
        "+setup -setup +step -step +step -step +step -step +checkpointing -checkpointing "
        "+step -step"
    )
    assert client.calls[0] == ("init_workload_monitoring",)
    assert client.calls[-1] == ("shutdown_workload_monitoring",)


def test_the_client_gets_the_limits_that_were_learned(
    monitor: sections.Monitor, client: FakeClient, tmp_path: Path
) -> None:
    Limits({"step": 45.0}).save(tmp_path / STATE_FILE)
    monitor.enable(str(tmp_path), learns=False)
    (state,) = [
        call[1]["current_timeouts"] for call in client.calls if call[0] == "load_state_dict"
    ]
    assert state == {
        "heartbeat": {"initial": None, "subsequent": None},
        "section": {
            "section": {"setup": 600.0, "step": 45.0, "checkpointing": None},
            "out_of_section": 90.0,
            "calculated_sections": ["step"],
            "is_out_of_section_calculated": False,
        },
    }


def test_a_launcher_without_the_sections_is_refused(
    monitor: sections.Monitor, client: FakeClient
) -> None:
    client.section_timeouts.section = {"step": 3.0}
    with pytest.raises(ConfigError, match="ft_launcher knows no section setup, checkpointing: "):
        monitor.enable(None, learns=False)


def test_limits_are_learned_and_saved_for_the_next_run(
    monitor: sections.Monitor, tmp_path: Path
) -> None:
    monitor.enable(str(tmp_path), learns=True)
    ft_integration.on_checkpoint_loaded(is_local_chkpt=False)
    train(CallbackList([Sections()]), 17)
    assert set(monitor.limits.learned) == {"setup", "step", OUT_OF_SECTION}
    assert Limits.load(tmp_path / STATE_FILE) == monitor.limits
    assert monitor.seen.counts == {"setup": 1, "step": 18, "checkpointing": 1, OUT_OF_SECTION: 19}


def test_a_setup_that_loads_nothing_is_too_short_to_learn(monitor: sections.Monitor) -> None:
    monitor.enable(None, learns=False)
    ft_integration.on_checkpoint_loaded(is_local_chkpt=True)
    train(CallbackList([Sections()]), 17)
    assert "setup" not in monitor.limits.learned


def test_without_calc_ft_timeouts_nothing_is_saved(
    monitor: sections.Monitor, tmp_path: Path
) -> None:
    monitor.enable(str(tmp_path), learns=False)
    train(CallbackList([Sections()]), 17)
    assert "step" in monitor.limits.learned
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_a_warning(
    monitor: sections.Monitor, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monitor.enable(str(tmp_path / "missing"), learns=True)
    train(CallbackList([Sections()]), 17)
    assert capsys.readouterr().out.count("WARNING: --calc-ft-timeouts: ") == 1


def test_a_rank_that_cannot_write_the_limits_still_joins_the_collective(
    monitor: sections.Monitor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monitor.enable(str(tmp_path / "missing"), learns=True)
    train(CallbackList([Sections()]), 17)
    joined: list[Any] = []

    def join(values: Any) -> Any:
        joined.append(values)
        return values

    monkeypatch.setattr(sections, "largest_of_ranks", join)
    monitor.learn()
    assert len(joined) == 1


def test_the_supervisor_sees_sections_and_limits(
    monitor: sections.Monitor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered: list[Any] = []
    monkeypatch.setattr(sections.faulthandler, "register", lambda *a, **k: registered.append(a[0]))
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    sections.start_heartbeat()
    assert registered == [signal.SIGUSR2]
    run = fake_run()
    callback = Sections()
    seen = []
    for _ in range(17):
        callback.on_step_start(run)
        seen.append(read_heartbeats(tmp_path)[0])
        run.state.advance(step_result(), 0.0)
        callback.on_step_end(run, step_result())
    assert [(beat.section, beat.iteration) for beat in seen[:3]] == [
        *(("setup", 1), ("step", 2), ("step", 3)),
    ]
    assert read_heartbeats(tmp_path)[0].section == OUT_OF_SECTION
    callback.on_train_end(run)
    assert Limits.load(tmp_path / STATE_FILE) == monitor.limits
    callback.close()
    assert read_heartbeats(tmp_path)[0].section == "ended"


def test_a_restart_inside_the_process_begins_with_a_setup(
    monitor: sections.Monitor, tmp_path: Path
) -> None:
    monitor.start(str(tmp_path))
    monitor.begin_step(1)
    monitor.end_step()
    monitor.begin_step(2)  # an exception ends the run in this step
    monitor.close()
    sections.start_heartbeat()
    assert read_heartbeats(tmp_path)[0].section == "setup"
    monitor.begin_step(2)
    monitor.end_step()
    assert read_heartbeats(tmp_path)[0].section == OUT_OF_SECTION


def test_functions_of_megatron_lm_report_the_sections(
    monitor: sections.Monitor, client: FakeClient, tmp_path: Path
) -> None:
    ft_integration.setup(Namespace(save=str(tmp_path), calc_ft_timeouts=False))
    for _ in range(2):
        ft_integration.on_training_step_start()
        ft_integration.on_training_step_end()
    ft_integration.on_eval_step_start()
    ft_integration.on_eval_step_end()
    ft_integration.on_checkpointing_start()
    ft_integration.on_checkpointing_end(is_async_finalization=False)
    assert ft_integration.get_rank_monitor_client() is client
    ft_integration.shutdown()
    assert client.sections() == (
        "+setup -setup +step -step +step -step +checkpointing -checkpointing"
    )
    assert ft_integration.get_rank_monitor_client() is None


def test_without_a_monitor_the_functions_do_nothing(monitor: sections.Monitor) -> None:
    ft_integration.on_training_step_start()
    ft_integration.on_training_step_end()
    ft_integration.on_checkpoint_loaded(is_local_chkpt=False)
    ft_integration.shutdown()
    assert not monitor.is_on


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(rank, signal) of the signals that ranks would get."""
    found: list[tuple[int, int]] = []

    class Timer:
        def __init__(self, delay_s: float, function: object, args: tuple[int, int]) -> None:
            assert function is os.kill
            assert 3 <= delay_s <= 3.6
            found.append((dist.get_rank(), args[1]))

        def start(self) -> None:
            pass

    monkeypatch.setattr(ft_integration, "threading", SimpleNamespace(Timer=Timer))
    return found


def simulate(rank: int, world_size: int) -> None:
    ft_integration.maybe_setup_simulated_fault()


@pytest.mark.parametrize(
    ("text", "signum"),
    [("rank_hung;1;3", signal.SIGSTOP), (" rank_killed ; 1 ; 3.0", signal.SIGKILL)],
)
def test_a_simulated_fault_hits_the_chosen_rank(
    text: str, signum: int, monkeypatch: pytest.MonkeyPatch, sent: list[tuple[int, int]]
) -> None:
    monkeypatch.setenv("FT_SIM_FAULT_DESC", text)
    run_virtual_ranks(simulate, 2)
    assert sent == [(1, signum)]


def test_a_random_simulated_fault_hits_one_rank(
    monkeypatch: pytest.MonkeyPatch, sent: list[tuple[int, int]]
) -> None:
    monkeypatch.setenv("FT_SIM_FAULT_DESC", "random;;3")
    run_virtual_ranks(simulate, 3)
    ((rank, signum),) = sent
    assert rank in range(3)
    assert signum in (signal.SIGSTOP, signal.SIGKILL)


@pytest.mark.parametrize("text", ["rank_hung", "spam;0;3", "rank_hung;1;3", "rank_hung;;-1", ";;x"])
def test_a_wrong_description_of_a_fault_is_refused(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FT_SIM_FAULT_DESC", text)
    monkeypatch.setattr(ft_integration.dist, "get_world_size", lambda: 1)
    with pytest.raises(ConfigError, match="FT_SIM_FAULT_DESC=.*KIND;RANK;SECONDS"):
        ft_integration.maybe_setup_simulated_fault()
