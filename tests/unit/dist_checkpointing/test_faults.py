"""Faults that a variable asks for."""

from __future__ import annotations

import errno
import os
import re
import signal
from pathlib import Path

import pytest

from megatron.core.config.errors import CheckpointDamaged, ConfigError
from megatron.core.diagnostics import fault_injection as module
from megatron.core.diagnostics.fault_injection import (
    POINTS,
    InjectedFault,
    check_faults,
    fault_point,
)
from megatron.training.initialize import configure
from tests.support.tiny_checkpoint import publish_model, read_all

MEGATRON = Path(module.__file__).parents[2]


@pytest.fixture
def faults(monkeypatch):
    return lambda text: monkeypatch.setenv("FAULTS", text)


def exit_status(point: str) -> int:
    """How a forked process ends that passes ``point``."""
    child = os.fork()
    if child == 0:
        try:
            fault_point(point)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, os.WUNTRACED)
    if os.WIFSTOPPED(status):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return -os.WSTOPSIG(status)
    return os.waitstatus_to_exitcode(status)


def test_nothing_happens_unset_or_elsewhere(faults):
    assert fault_point("a") is None
    faults("b:raise")
    assert fault_point("a") is None


def test_raise_and_enospc(faults):
    faults("a:raise,b:enospc")
    with pytest.raises(InjectedFault, match="injected by FAULTS at a"):
        fault_point("a")
    with pytest.raises(OSError, match="No space left") as caught:
        fault_point("b")
    assert caught.value.errno == errno.ENOSPC


def test_kill_stop_and_exit(faults):
    faults("a:kill,b:stop,c:exit")
    assert exit_status("a") == -signal.SIGKILL
    assert exit_status("b") == -signal.SIGSTOP
    assert exit_status("c") == 1


def test_step_rank_and_number_of_times_limit_a_fault(faults, monkeypatch):
    faults("a:raise:step3:rank1:times2")
    fault_point("a", step=3)
    monkeypatch.setenv("RANK", "1")
    fault_point("a", step=2)
    for _ in range(2):
        with pytest.raises(InjectedFault):
            fault_point("a", step=3)
    fault_point("a", step=3)


def test_what_the_caller_carries_out_is_returned(faults):
    faults("a:nan,b:bitflip,c:slow:0.0s")
    assert fault_point("a") == "nan"
    assert fault_point("b") == "bitflip"
    assert fault_point("c") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a", "kind '' is none of raise, kill"),
        ("a:burn", "kind 'burn' is none of raise"),
        ("a:kill:node3", "'node3' is none of rankR, stepS, startN, timesT, Xs"),
    ],
)
def test_a_spec_that_cannot_be_read_is_an_error(faults, text, message):
    faults(text)
    with pytest.raises(ConfigError, match=message):
        fault_point("a")


def test_the_points_that_are_told_are_those_that_there_are():
    folders = MEGATRON, MEGATRON.parent / "tools"
    texts = [path.read_text() for folder in folders for path in folder.rglob("*.py")]
    called = {name for text in texts for name in re.findall(r'\bfault_point\("([\w.]+)"', text)}
    assert called == set(POINTS)


def test_a_fault_that_would_never_happen_is_refused_with_those_that_can(faults):
    faults("save.after_renaming:kill")
    with pytest.raises(
        ConfigError, match=r"FAULTS=save\.after_renaming:kill: .*save\.after_rename"
    ):
        configure(argv=[])
    faults("load.tensor:nan")
    with pytest.raises(ConfigError, match=r"nan is possible at step\.gradient$"):
        check_faults()
    faults("step.gradient:nan,save.tensor:bitflip,load.tensor:kill:step3")
    check_faults()


def test_a_bit_that_the_disk_loses_is_found_by_the_load(tmp_path, faults):
    publish_model(tmp_path, 1)
    faults("save.tensor:bitflip:step2:times1")
    folder = publish_model(tmp_path, 2)
    with pytest.raises(CheckpointDamaged, match=r"__0_0\.safetensors is damaged"):
        read_all(folder)
