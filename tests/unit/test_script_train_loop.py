"""Functions for the train loop of scripts, where the functional tests do not reach."""

from __future__ import annotations

import argparse

import pytest
import torch
from torch.utils.data import DataLoader

from megatron.core.config.errors import ConfigError
from megatron.training.arguments.flat_values import flat_values
from megatron.training.compat import checkpointing, global_vars, train_loop
from megatron.training.initialize import initialize_megatron
from megatron.training.yaml_arguments import core_transformer_config_from_yaml
from tests.support.command_lines import run_of
from tests.support.small_run import small_run


@pytest.fixture
def nothing_runs():
    """No run before, none after."""
    global_vars.set_run(None)
    yield
    global_vars.set_run(None)


def test_an_iterator_has_no_end_and_passes_begin_at_the_first():
    data = train_loop.DataIterator(DataLoader(torch.arange(3), batch_size=1))
    assert [int(next(data)) for _ in range(4)] == [0, 1, 2, 0]
    assert [int(x) for x in data] == [0, 1, 2]
    assert int(next(data)) == 1
    assert len(data.dataset) == 3


def test_train_iters_follow_from_samples():
    values = {"train_samples": 50, "data_parallel_size": 1, "rampup_batch_size": None}
    values |= {"micro_batch_size": 2, "global_batch_size": 8, "train_iters": None}
    args = argparse.Namespace(**values, decrease_batch_size_if_needed=False)
    train_loop.update_train_iters(args)
    assert args.train_iters == 6
    args.train_samples = 8
    train_loop.update_train_iters(args)
    assert args.train_iters == 6


def test_another_schedule_is_refused():
    with pytest.raises(ConfigError, match="the layout has one schedule.*leave the argument out"):
        train_loop.train_step(None, None, [], None, None, forward_backward_func=print)


def test_a_short_lived_checkpoint_needs_its_kind(nothing_runs):
    global_vars.set_run(small_run(run_of()))
    with pytest.raises(ConfigError, match="needs --non-persistent-ckpt-type global or local"):
        checkpointing.save_checkpoint(1, [], None, None, 0, non_persistent_ckpt=True)


def test_logging_comes_after_a_step(nothing_runs):
    global_vars.set_run(small_run(run_of()))
    with pytest.raises(AssertionError, match=r"train_step\(\) comes before training_log\(\)"):
        train_loop.training_log({}, {}, 0.1, None, 1, 1.0, False, 0, None, None, None)


def test_without_a_run_scripts_hear_what_comes_first(nothing_runs):
    with pytest.raises(RuntimeError, match="call pretrain.. or initialize_megatron.. first"):
        train_loop.get_model(lambda **stage: None)


def test_process_groups_are_always_made():
    with pytest.raises(ConfigError, match="skip_mpu_initialization=True.*: the process groups are"):
        initialize_megatron(skip_mpu_initialization=True)


def test_a_yaml_file_gives_the_config_of_its_values():
    args = argparse.Namespace(**flat_values(run_of("--swiglu")))
    assert core_transformer_config_from_yaml(args).gated_linear_unit
