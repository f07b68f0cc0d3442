"""A step whose result is judged while the next one runs: transitions of the rerun state machine."""

from __future__ import annotations

import logging
import math

import pytest
import torch

from megatron.core.diagnostics.result_faults import Place
from megatron.core.diagnostics.sent_norm import ReadNorm
from megatron.core.diagnostics.suspect_result import (
    Call,
    Caller,
    Findings,
    Request,
    Suspect,
    request_after,
    suspect_after,
)
from megatron.core.distributed.non_finite import LossCheck
from megatron.core.rerun_state_machine import (
    RerunErrorInjector,
    RerunMode,
    RerunState,
    RerunStateMachine,
)
from tests.unit.test_rerun_state_machine import GO_ON, NAN, Run


def _read(value: float, *losses: float) -> ReadNorm:
    return ReadNorm(value, None, list(losses))


def test_a_deferred_step_is_judged_in_the_next_one():
    run = Run()
    machine = run.machine
    for value in (1.0, 2.0):
        assert machine.should_run_forward_backward(run.data)
        run.read.append(next(run.data))
        run.changed.append(0)
        if run.read[1:]:
            assert machine.is_accepted(_read(value, 1.0), is_checked=True)
            machine.accept(run.data)
            assert run.data.saved_microbatches == [1]
        machine.defer()
    assert run.read == [0, 1]
    assert run.changed == [0, 0]


def test_a_rejected_deferred_step_is_computed_again_and_the_work_after_it_is_dropped():
    run = Run()
    machine = run.machine
    for _ in range(2):
        assert machine.should_run_forward_backward(run.data)
        run.read.append(next(run.data))
        run.changed.append(0)
        if machine.current_iteration == 1:
            machine.defer()
    read = _read(NAN)
    assert machine.is_accepted(read, is_checked=False)
    assert not machine.is_accepted(_read(1.0, NAN), is_checked=True)
    assert not machine.is_accepted(read, is_checked=True)
    machine.return_to_deferred(run.data, read)
    assert run.changed == []
    assert machine.current_iteration == 1
    machine.validate_result(NAN, math.isnan, "found NaN")
    assert machine.should_run_forward_backward(run.data)
    run.read.append(next(run.data))
    run.changed.append(1)
    machine.validate_result(1.0, math.isnan, "found NaN")
    assert not machine.should_run_forward_backward(run.data)
    assert machine.should_checkpoint_and_exit() == GO_ON
    assert run.step(1.0) == GO_ON
    assert run.read == [0, 1, 0, 1]
    assert run.changed == [1, 0]


def test_a_loss_function_that_validates_with_our_message_gets_the_right_diagnosis(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Megatron-LM's loss function does; the deferred pass validates our losses at its end."""
    losses = [1.0, 2.0, NAN]
    machine = Run().machine

    def one_pass(check: LossCheck) -> None:
        for microbatch, loss in enumerate(losses):
            message = "found NaN in local forward loss calculation"
            machine.validate_result(loss, math.isnan, message)
            check(torch.tensor(loss), microbatch)

    assert machine.should_run_forward_backward(None)
    deferred = LossCheck(machine, defers=True)
    one_pass(deferred)
    machine.defer()
    read = _read(NAN, *losses)
    machine.return_to_deferred(None, read)
    deferred.check_deferred(read.losses)
    assert machine.should_run_forward_backward(None)
    again = LossCheck(machine)
    with caplog.at_level(logging.INFO):
        one_pass(again)
        again.check()
    assert "unexpected result is reproducible within the tolerance (nan = nan)" in caplog.text
    assert "transient" not in caplog.text
    assert not machine.should_run_forward_backward(None)
    assert machine.outcome == Request.RERUN


def test_a_step_that_is_computed_again_anyway_is_not_deferred():
    run = Run()
    assert run.machine.can_defer(is_checked=True)
    run.step(NAN, NAN)
    assert not run.restarted().machine.can_defer(is_checked=True)
    assert not Run(error_injector=RerunErrorInjector(9)).machine.can_defer(is_checked=True)
    plain = RerunStateMachine()
    assert plain.can_defer(is_checked=False)
    assert not plain.can_defer(is_checked=True), "the message names gradients"
    statistics = RerunStateMachine(mode=RerunMode.REPORT_DETERMINISM_STATS)
    assert not statistics.can_defer(is_checked=False)


def test_the_second_pass_knows_better_whether_all_ranks_share_a_result():
    call = Call(Caller("norm", 0), 0)
    first, second = (
        Suspect(call=call, result=NAN, place=Place(0, "n", "0"), is_shared=shared)
        for shared in (True, False)
    )
    found = Findings(rejected=second, difference=0.0)
    assert suspect_after(found, first) is second
    state = RerunState.RERUNNING_IN_PLACE
    here = Place(0, "n", "0")
    assert request_after(state, found, first, here=here, num_ranks=2) == Request.RERUN
