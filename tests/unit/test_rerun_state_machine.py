"""Checks of results through the reference's interface."""

from __future__ import annotations

import logging
from functools import partial

import pytest
import torch

from megatron.core.config.errors import NonFiniteError
from megatron.core.rerun_state_machine import RerunStateMachine, get_rerun_state_machine


def test_a_rejected_result_ends_the_run_with_rank_and_value():
    with pytest.raises(NonFiniteError, match="rank 0: NaN in the loss: nan"):
        get_rerun_state_machine().validate_result(
            result=torch.tensor(float("nan")),
            rejection_func=torch.isnan,
            message="NaN in the loss",
            tolerance=0.0,
            fatal=True,
        )


def test_any_element_may_be_rejected():
    with pytest.raises(NonFiniteError, match="unexpected result"):
        get_rerun_state_machine().validate_result(torch.tensor([1.0, float("inf")]), torch.isinf)


def test_a_good_result_passes():
    get_rerun_state_machine().validate_result(torch.tensor(1.0), torch.isnan)


def test_what_is_not_fatal_is_logged(caplog):
    machine = RerunStateMachine()
    is_spike = partial(machine.is_unexpectedly_large, threshold=10, context="loss", num_samples=2)
    with caplog.at_level(logging.WARNING):
        for value in (2.0, 3.0, 29.0, 30.0):
            machine.validate_result(torch.tensor(value), is_spike, "spiky loss", fatal=False)
    assert [r.message for r in caplog.records] == ["rank 0: spiky loss: 30.0"]


def test_contexts_are_apart_and_may_begin_anew():
    machine = RerunStateMachine()
    assert not machine.is_unexpectedly_large(torch.tensor(1.0), 2, "a", num_samples=1)
    assert not machine.is_unexpectedly_large(torch.tensor(9.0), 2, "b", num_samples=1)
    assert machine.is_unexpectedly_large(torch.tensor(2.0), 2, "a", num_samples=1)
    assert not machine.is_unexpectedly_large(torch.tensor(2.0), 2, "a", 1, resample=True)
    assert not machine.is_unexpectedly_large(torch.tensor(3.0), 2, "a", num_samples=1)
