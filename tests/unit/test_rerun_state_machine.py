"""Validation of results, each transition of the rerun state machine, and its parts."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron.core.config.errors import ConfigError, NonFiniteError
from megatron.core.rerun.results import (
    Call,
    Caller,
    Findings,
    Place,
    QuickStats,
    Request,
    RerunDiagnostic,
    RerunErrorInjector,
    RerunMode,
    RerunState,
    Suspect,
    relative_difference,
    request_after,
)
from megatron.core.rerun.state_machine import (
    RerunDataIterator,
    RerunStateMachine,
    get_rerun_state_machine,
)
from tests.support.ranks import run_ranks

NAN = math.nan
GO_ON = (False, False, 0)
RESTART = (True, True, 16)
STOP = (False, True, 17)
SAVE_AND_STOP = (True, True, 17)


class Run:
    """A run whose step validates the next one of ``values`` in each pass."""

    def __init__(self, **options: Any) -> None:
        self.changed: list[int] = []  # state that a pass changes
        self.machine = RerunStateMachine(
            state_save_func=lambda: list(self.changed),
            state_restore_func=lambda saved: self.changed.__setitem__(slice(None), saved),
            mode=RerunMode.VALIDATE_RESULTS,
            **options,
        )
        self.data = RerunDataIterator(range(100))
        self.read: list[int] = []

    def step(self, *values: float, fatal: bool = True) -> tuple[bool, bool, int]:
        """Run a step; return what `should_checkpoint_and_exit` returns."""
        passes = 0
        while self.machine.should_run_forward_backward(self.data):
            self.read.append(next(self.data))
            self.changed.append(passes)
            value = torch.tensor(values[passes])
            self.machine.validate_result(value, torch.isnan, "found NaN", fatal=fatal)
            passes += 1
        assert passes == len(values), "every value was validated"
        return self.machine.should_checkpoint_and_exit()

    def restarted(self, **options: Any) -> Run:
        """Return the run that starts from the checkpoint, which is JSON."""
        other = Run(**options)
        saved = self.machine.saved_state()
        assert saved is not None
        other.machine.load_saved_state(json.loads(json.dumps(saved)))
        return other


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


def test_a_transient_error_uses_the_second_pass_of_the_same_data_and_state():
    run = Run()
    assert run.step(1.0) == run.step(NAN, 2.0) == run.step(3.0) == GO_ON
    assert run.read == [0, 1, 1, 2]
    assert run.changed == [0, 1, 0], "the first pass of the second step left nothing"
    assert run.machine.saved_state() is None


def test_a_reproduced_result_goes_back_and_restarts_from_a_checkpoint():
    run = Run()
    run.step(1.0)
    assert run.step(NAN, NAN) == RESTART
    assert run.changed == [0], "the state before the step"
    assert next(run.data) == 1
    assert run.machine.state == RerunState.WILL_RERUN_FROM_CHECKPOINT


@pytest.mark.parametrize("fatal", [True, False])
def test_another_result_after_the_restart_blames_the_device_once(fatal: bool):
    run = Run()
    assert run.step(NAN, NAN, fatal=fatal) == RESTART
    again = run.restarted()
    assert again.step(1.0, fatal=fatal) == SAVE_AND_STOP
    assert again.machine.blamed == Place.here(0)
    assert again.machine.saved_state() is None, "a start after exit code 17 judges nothing"


def test_the_same_result_after_the_restart_is_correct():
    run = Run()
    assert run.step(NAN, NAN) == RESTART
    assert run.restarted().step(NAN) == STOP
    assert run.restarted().step(NAN) == STOP, "no start runs the step more than once"


def test_a_correct_result_that_is_not_fatal_is_used():
    run = Run()
    assert run.step(NAN, NAN, fatal=False) == RESTART
    again = run.restarted()
    assert again.step(NAN, fatal=False) == again.step(1.0) == GO_ON


def test_a_skipped_step_is_not_judged_again():
    run = Run()
    run.step(NAN, NAN)
    again = run.restarted()
    again.machine.current_iteration += 1  # the step of the suspect was skipped
    assert again.step(NAN, 1.0) == GO_ON


def test_another_but_again_unexpected_result_is_not_used():
    run = Run()
    is_large = partial(torch.gt, other=10.0)
    values = iter([20.0, 30.0])
    while run.machine.should_run_forward_backward(run.data):
        run.machine.validate_result(torch.tensor(next(values)), is_large, "too large")
    assert run.machine.should_checkpoint_and_exit() == RESTART
    saved = run.machine.saved_state()
    assert saved is not None
    assert Suspect.from_json(saved["suspect"]).result == 30.0


def test_a_validation_of_the_second_pass_alone_is_not_used_either():
    machine = RerunStateMachine(mode=RerunMode.VALIDATE_RESULTS)
    found = iter([(NAN, 1.0), (1.0, NAN)])
    while machine.should_run_forward_backward(None):
        for name, value in zip("ab", next(found), strict=True):
            machine.validate_result(value, math.isnan, name)
    assert machine.should_checkpoint_and_exit() == RESTART


def test_tolerance_decides_whether_a_result_is_the_same():
    for tolerance, expected in ((0.2, RESTART), (0.01, GO_ON)):
        machine = RerunStateMachine(mode=RerunMode.VALIDATE_RESULTS)
        values = iter([1.0, 1.1])
        while machine.should_run_forward_backward(None):
            machine.validate_result(
                next(values), lambda _: True, "odd", tolerance=tolerance, fatal=False
            )
        assert machine.should_checkpoint_and_exit() == expected


def test_counts_of_largest_values_are_those_of_one_pass():
    machine = RerunStateMachine(mode=RerunMode.VALIDATE_RESULTS)
    spike = partial(machine.is_unexpectedly_large, threshold=10, context="loss", num_samples=2)
    outcomes = []
    for values in ([1.0], [NAN, 1.0], [50.0, 1.0]):
        left = iter(values)
        while machine.should_run_forward_backward(None):
            value = next(left)
            machine.validate_result(value, math.isnan, "NaN")
            machine.validate_result(torch.tensor(value), spike, "Spiky loss", fatal=False)
        outcomes.append(machine.should_checkpoint_and_exit())
    assert outcomes == [GO_ON] * 3
    saved = machine.saved_state()
    assert saved is not None
    assert saved["large_value_counts"] == {"loss": 2}
    again = RerunStateMachine(mode=RerunMode.VALIDATE_RESULTS)
    again.load_saved_state(json.loads(json.dumps(saved)))
    assert again.is_unexpectedly_large(10.0, 10, "loss", num_samples=2)


@pytest.mark.parametrize(
    ("kind", "outcomes"),
    [
        ("transient_error", [GO_ON]),
        ("persistent_error", [RESTART, SAVE_AND_STOP]),
        ("correct_result", [RESTART, STOP]),
    ],
)
def test_each_injected_error_gets_its_diagnosis(kind: str, outcomes: list[object]):
    injector = RerunErrorInjector(1, RerunDiagnostic(kind))
    run = Run(error_injector=injector)
    assert run.step(1.0) == GO_ON, "not in the first step"
    assert run.step(1.0, 1.0) == outcomes[0]
    if len(outcomes) > 1:
        again = run.restarted(error_injector=RerunErrorInjector(1, RerunDiagnostic(kind)))
        assert again.step(1.0) == outcomes[1]


def test_an_injector_of_rate_n_rejects_one_in_n_results_and_changes_no_random_state():
    injector = RerunErrorInjector(50)
    before = torch.get_rng_state()
    count = 0
    for _ in range(5000):
        count += injector.maybe_inject()
        injector.injected_error_type = None
    assert 50 < count < 150
    assert torch.equal(torch.get_rng_state(), before)
    assert not any(RerunErrorInjector(0).maybe_inject() for _ in range(100))


def test_statistics_of_determinism_compare_two_passes_of_every_step(
    caplog: pytest.LogCaptureFixture,
):
    machine = RerunStateMachine(mode=RerunMode.REPORT_DETERMINISM_STATS)
    values = iter([1.0, 1.0, 2.0, 1.0])
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            while machine.should_run_forward_backward(None):
                machine.validate_result(next(values), math.isnan, "found NaN")
            assert machine.should_checkpoint_and_exit() == GO_ON
    assert "'found NaN' on rank 0 in 2 iterations: 1/2 identical samples" in caplog.text
    assert "max 5.000e-01" in caplog.text


def test_without_reruns_a_step_has_one_pass_and_its_data_are_not_kept():
    machine = RerunStateMachine()
    data = RerunDataIterator(range(3))
    for expected in (0, 1):
        assert machine.should_run_forward_backward(data)
        assert next(data) == expected
        assert not machine.should_run_forward_backward(data)
        assert machine.should_checkpoint_and_exit() == GO_ON


def suspect_at(place: Place, **fields: Any) -> Suspect:
    return Suspect(call=Call(Caller("a", place.rank), 0), result=NAN, place=place, **fields)


@pytest.mark.parametrize(
    ("suspect", "num_ranks", "expected"),
    [
        (suspect_at(Place(0, "node", "0")), 2, Request.RERUN_ELSEWHERE),
        (suspect_at(Place(0, "node", "0")), 1, Request.STOP_CORRECT),
        (suspect_at(Place(0, "node", "0"), num_starts=1), 2, Request.STOP_CORRECT),
        (suspect_at(Place(0, "other", "0")), 2, Request.STOP_CORRECT),
        (suspect_at(Place(0, "node", "1"), fatal=False), 2, Request.EXPLAINED),
    ],
)
def test_a_start_on_the_same_device_asks_for_another_one_once(
    suspect: Suspect, num_ranks: int, expected: Request
):
    request = request_after(
        RerunState.RERUNNING_FROM_CHECKPOINT,
        Findings(rejected=suspect, difference=0.0),
        suspect,
        here=Place(0, "node", "0"),
        num_ranks=num_ranks,
    )
    assert request == expected


def _one_bad_rank(rank: int, world_size: int, values: Sequence[Sequence[float]]) -> None:
    """Rank 1 validates ``values[0]`` alone; every rank validates ``values[1]``."""
    machine = RerunStateMachine(mode=RerunMode.VALIDATE_RESULTS)
    own, shared = map(iter, values)
    while machine.should_run_forward_backward(None):
        mine = next(own)
        everyones = next(shared)
        if rank == 1:
            machine.validate_result(mine, math.isnan, "local")
        squares = torch.tensor(everyones, dtype=torch.float64)
        with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduce:
            sent = machine.send_norm(squares, is_checked=True)
        machine.read_squared_norm(sent)
        is_accepted = not any(map(math.isnan, (everyones, values[0][0])))
        assert bool(sent.accepted) == is_accepted or machine.state != RerunState.INITIAL_RUN
        assert reduce.call_count == (machine.state == RerunState.INITIAL_RUN)
        machine.validate_result(everyones, math.isnan, "norm", is_shared=True)
    assert machine.should_checkpoint_and_exit() == RESTART
    suspects = {0: None, 1: "local"} if math.isnan(values[0][1]) else dict.fromkeys((0, 1), "norm")
    suspect = machine.suspect
    assert (suspect and suspect.call.caller.message) == suspects[rank]


@pytest.mark.parametrize(
    "values", [((NAN, NAN), (NAN, NAN)), ((NAN, NAN), (1.0, 1.0)), ((1.0, 1.0), (NAN, NAN))]
)
def test_all_ranks_agree_and_only_a_rank_with_a_result_of_its_own_is_suspected(values: object):
    run_ranks(_one_bad_rank, 2, values)


def test_tracker_file_records_results_and_names_the_steps_to_skip(tmp_path: Path):
    path = str(tmp_path / "tracker")
    skipped = RerunStateMachine.get_skipped_iterations_from_tracker_file
    assert skipped(path) == []
    run = Run(result_rejected_tracker_filename=path)
    run.machine.current_iteration = 6
    run.step(NAN, NAN)
    assert skipped(path) == []
    run.restarted(result_rejected_tracker_filename=path).step(NAN)
    assert skipped(path) == [7]
    first = Path(path).read_text().splitlines()[0]
    assert " rank=0 iteration=7 status=first_rerun_reproducible result=nan " in first
    assert first.endswith("message='found NaN'")
    plain = RerunStateMachine(result_rejected_tracker_filename=path)
    for _ in range(2):
        with pytest.raises(NonFiniteError):
            plain.validate_result(torch.full((40,), NAN), torch.isnan, "two\nlines")
    assert skipped(path) == [0, 7], "rejected twice on one rank without reruns"
    Path(path).write_text("something else\n")
    with pytest.raises(ConfigError, match="line 1 is no record of a rejected result"):
        skipped(path)


def test_differences_are_relative_and_equal_nan_are_equal():
    assert relative_difference(NAN, torch.tensor(NAN)) == 0
    assert relative_difference(math.inf, math.inf) == 0
    assert relative_difference(2.0, torch.tensor(1.0)) == 0.5
    assert relative_difference(1.0, NAN) == math.inf
    assert relative_difference(torch.ones(2), torch.ones(3)) == math.inf


def test_a_tensor_keeps_its_values_in_the_saved_state():
    suspect = Suspect(
        call=Call(Caller("a", 3), 1),
        result=torch.tensor([[1.5, NAN], [math.inf, -2.0]]),
        place=Place(3, "n", "1"),
    )
    again = Suspect.from_json(json.loads(json.dumps(suspect.to_json())))
    assert relative_difference(again.result, suspect.result) == 0
    assert (again.call, again.place, again.fatal) == (suspect.call, suspect.place, True)


def test_statistics_of_ranks_combine():
    a = QuickStats(max_size=2)
    b = QuickStats()
    for value in (0.0, 1.0, 2.0, 3.0):
        a.record(value)
    b.record(5.0)
    b.combine([a])
    assert b.print_stats().startswith("1/5 identical samples")
    assert b.max == 5.0
    b.reset()
    assert b.print_stats() == "0/0 identical samples"


def test_a_data_iterator_rewinds_to_the_last_advance():
    data = RerunDataIterator(iter("abcdef"))
    assert [next(data), next(data)] == ["a", "b"]
    data.rewind()
    assert [next(data), next(data), next(data)] == ["a", "b", "c"]
    state = data.state_dict()
    data.advance()
    assert next(data) == "d"
    data.rewind()
    data.advance()
    assert [next(data), next(data)] == ["d", "e"]
    other = RerunDataIterator(iter("xyz"))
    other.load_state_dict(state)
    assert [next(other) for _ in range(4)] == ["a", "b", "c", "x"]
