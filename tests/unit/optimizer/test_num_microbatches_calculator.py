"""Batch sizes over a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from megatron.core import num_microbatches_calculator as facade
from megatron.core.config.errors import ConfigError
from megatron.core.num_microbatches_calculator import NumMicroBatchesCalculator


@dataclass(frozen=True)
class Options:
    micro_batch_size: int | None = 2
    global_batch_size: int | None = 16
    rampup_batch_size: tuple[str | int, ...] | None = None
    decrease_batch_size_if_needed: bool = False


def calculator(data_parallel_size: int = 2, **options: object) -> NumMicroBatchesCalculator:
    return NumMicroBatchesCalculator.from_config(Options(**options), data_parallel_size)


def batches(calc: NumMicroBatchesCalculator, steps: int) -> list[int]:
    sizes, consumed = [], 0
    for _ in range(steps):
        sizes.append(calc.global_batch_size(consumed))
        consumed += sizes[-1]
    return sizes


def test_a_constant_batch_is_cut_into_equal_microbatches():
    calc = calculator()
    assert [calc.num_microbatches(n) for n in (0, 16, 10**9)] == [4, 4, 4]
    assert calc.num_microbatches_at_full_size() == 4
    assert calc.train_iters(16 * 7 + 15) == 7


def test_without_a_global_batch_size_every_replica_does_one_microbatch():
    assert calculator(global_batch_size=None).num_microbatches(0) == 1


@pytest.mark.feature("Training: batch-size ramp-up, also across a resume")
def test_the_ramp_grows_by_increments_over_its_samples():
    # Three increments over 48 samples: one every 16.
    calc = calculator(rampup_batch_size=("4", "4", "48"))
    assert batches(calc, 10) == [4, 4, 4, 4, 8, 8, 12, 12, 16, 16]
    assert calc.num_microbatches(0) == 1
    assert calc.full_global_batch_size == 16


def test_the_whole_ramp_counts_up_to_and_including_its_last_sample():
    calc = calculator(rampup_batch_size=(4, 4, 48))
    assert calc.global_batch_size(47) == 12
    assert calc.global_batch_size(48) == calc.global_batch_size(49) == 16


def test_a_ramp_over_no_samples_starts_at_the_full_size():
    assert batches(calculator(rampup_batch_size=(4, 4, 0)), 2) == [16, 16]


def test_a_ramp_that_starts_at_the_full_size_is_constant():
    assert batches(calculator(rampup_batch_size=(16, 4, 100)), 2) == [16, 16]


@pytest.mark.parametrize("train_samples", [0, 3, 4, 30, 55, 56, 57, 200, 1000])
def test_train_iters_are_the_whole_batches_of_a_simulated_run(train_samples: int):
    calc = calculator(rampup_batch_size=(4, 4, 48))
    consumed = iterations = 0
    while consumed + calc.global_batch_size(consumed) <= train_samples:
        consumed += calc.global_batch_size(consumed)
        iterations += 1
    assert calc.train_iters(train_samples) == iterations


@pytest.mark.parametrize("done", [0, 1, 5, 9, 30])
def test_steps_done_and_steps_left_are_the_whole_run(done: int):
    calc = calculator(rampup_batch_size=(4, 4, 48))
    consumed = sum(batches(calc, done))
    assert done + calc.train_iters(1000, consumed) == calc.train_iters(1000)


def test_nothing_is_left_of_fewer_samples_than_are_consumed():
    assert calculator().train_iters(100, 1000) == 0


def test_a_resumed_run_continues_the_ramp_where_it_was():
    calc = calculator(rampup_batch_size=(4, 4, 48))
    consumed = sum(batches(calc, 5))
    assert calc.global_batch_size(consumed) == batches(calc, 6)[5]


def test_a_batch_that_does_not_divide_is_decreased_when_allowed():
    calc = calculator(
        data_parallel_size=3, global_batch_size=16, decrease_batch_size_if_needed=True
    )
    assert (calc.nominal_batch_size(0), calc.global_batch_size(0)) == (16, 12)
    assert calc.num_microbatches(0) == calc.num_microbatches_at_full_size() == 2
    assert calc.train_iters(25) == 2


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"global_batch_size": 18}, r"--global-batch-size 18 is not a multiple of 4 .*2 x 2"),
        ({"global_batch_size": 2}, r"--global-batch-size 2 samples are fewer than 4"),
        (
            {"global_batch_size": 2, "decrease_batch_size_if_needed": True},
            r"--global-batch-size 2 samples are fewer than 4",
        ),
        ({"micro_batch_size": None}, r"--micro-batch-size is missing"),
        ({"micro_batch_size": 0}, r"--micro-batch-size 0 and .* must both be at least 1"),
        ({"rampup_batch_size": ("4", "4")}, r"takes three integers .* not '4 4'"),
        ({"rampup_batch_size": ("4", "x", "8")}, r"takes three integers"),
        ({"rampup_batch_size": (0, 4, 8)}, r"start and increment must be at least 1"),
        ({"rampup_batch_size": (4, 5, 8)}, r"steps of 5 do not lead to --global-batch-size 16"),
        ({"rampup_batch_size": (20, 4, 8)}, r"from 20, steps of 4 do not lead"),
        ({"rampup_batch_size": (2, 2, 8)}, r"--rampup-batch-size 2 2 8: 2 samples are fewer"),
        ({"rampup_batch_size": (4, 2, 48)}, r"--rampup-batch-size 4 2 48: 6 is not a multiple"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_at_start(options: dict, sentence: str):
    with pytest.raises(ConfigError, match=sentence):
        calculator(**options)


@pytest.fixture
def installed() -> Iterator[None]:
    facade.init_num_microbatches_calculator(1, (4, 4, 48), 16, 2, 2)
    yield
    facade.destroy_num_microbatches_calculator()


def test_the_facade_answers_for_the_coming_step(installed: None):
    assert facade.get_num_microbatches() == 1
    facade.update_num_microbatches(32)
    assert facade.get_num_microbatches() == 3
    assert facade.get_current_global_batch_size() == 12
    assert facade.get_current_running_global_batch_size() == 12
    assert facade.get_micro_batch_size() == 2


def test_the_facade_is_installed_once_and_can_be_reconfigured(installed: None):
    with pytest.raises(RuntimeError, match="reconfigure or destroy first"):
        facade.init_num_microbatches_calculator(1, None, 16, 2, 2)
    facade.reconfigure_num_microbatches_calculator(0, None, 8, 1, 2)
    assert facade.get_num_microbatches() == 4


def test_the_facade_says_when_nothing_is_installed():
    with pytest.raises(RuntimeError, match="init_num_microbatches_calculator"):
        facade.get_num_microbatches()


def test_a_change_of_size_is_logged_when_asked_for(
    installed: None, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level("INFO"):
        facade.update_num_microbatches(16, verbose=True)
        facade.update_num_microbatches(17, verbose=True)
    assert caplog.messages == ["ramping up batch size to 8"]
