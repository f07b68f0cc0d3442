"""The state of reruns in Megatron-LM's form."""

from __future__ import annotations

import io
import pickle

import pytest

from megatron.core import rerun_state_machine as reference
from megatron.core.dist_checkpointing.megatron_formats.archive import _PROTOCOL, _Pickler
from megatron.core.dist_checkpointing.megatron_formats.reference_values import (
    reference_mode,
    reference_rerun,
    rerun_state_of,
)
from megatron.core.dist_checkpointing.megatron_formats.unpickler import unpickle
from megatron.core.rerun.faults import RerunMode, RerunState
from megatron.core.rerun.state_machine import RerunStateMachine
from tests.unit.test_rerun_state_machine import NAN, RESTART, STOP, Run


def pickled(value: object) -> bytes:
    """The pickle in an archive."""
    file = io.BytesIO()
    _Pickler(file, _PROTOCOL).dump(value)
    return file.getvalue()


@pytest.fixture
def saved() -> dict[str, object]:
    """The state of a run whose step has a NaN."""
    run = Run()
    run.step(1.0)
    assert run.step(NAN, NAN) == RESTART
    state = run.machine.saved_state()
    assert state is not None
    return state


def test_the_state_is_read_as_it_was_written(saved) -> None:
    assert rerun_state_of(unpickle(pickled(reference_rerun(saved)), "file")) == saved


def test_the_state_of_megatron_lm_is_diagnosed(saved) -> None:
    of_theirs = unpickle(pickled(reference_rerun(saved)), "file")
    del of_theirs["saved_state"]
    machine = RerunStateMachine(mode=RerunMode.VALIDATE_RESULTS)
    machine.load_saved_state(rerun_state_of(of_theirs))
    assert machine.state == RerunState.WILL_RERUN_FROM_CHECKPOINT
    while machine.should_run_forward_backward(None):
        machine.validate_result(NAN, lambda x: x != x, "found NaN")
    assert machine.should_checkpoint_and_exit() == STOP


def test_the_objects_are_of_the_classes_of_megatron_lm(saved) -> None:
    """A pickle refers to them by module and name; those of this project stand in for them."""
    content = pickle.loads(pickled({**reference_mode(), "sharded": reference_rerun(saved)}))
    assert content["mode"] is RerunMode.VALIDATE_RESULTS
    sharded = content["sharded"]
    assert sharded["state"] is RerunState.WILL_RERUN_FROM_CHECKPOINT
    assert sharded["failed_validation_call"] == reference.Call(reference.Caller("found NaN", 0), 0)
    assert sharded["error_injector_checkpoint"]["error_injection_type"] == "transient_error"
    assert sharded["current_iteration"] == 2
