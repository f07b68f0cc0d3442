"""The reference's names for scripts."""

from __future__ import annotations

import argparse
from dataclasses import replace

import pytest

from megatron.core.config.errors import CheckpointError
from megatron.training import checkpointing
from megatron.training.compat import global_vars
from megatron.training.runtime.context import TrainState
from tests.support.command_lines import run_of
from tests.support.small_run import small_run
from tests.support.tiny_run import (
    advance,
    assert_equal,
    make_parts,
    options,
    values,
)


@pytest.fixture
def run(tmp_path):
    """A run that goes on."""
    run = small_run(
        replace(run_of(), checkpoint=options(tmp_path), asked={"num_layers": 3}),
        groups=make_parts().groups,
        state=TrainState(iteration=1, consumed_train_samples=24),
    )
    global_vars.set_run(run)
    yield run
    global_vars.set_run(None)


def test_a_script_saves_and_loads_with_the_reference_s_arguments(run, tmp_path):
    parts = make_parts()
    advance(parts, 2)
    model = parts.model_chunks[0]
    checkpointing.save_checkpoint(4, [model], parts.optimizer, parts.scheduler, 2e15)
    assert (tmp_path / "iter_0000004" / "config.yaml").exists()
    run.state = TrainState()
    again = make_parts(seed=3)
    found = checkpointing.load_checkpoint(
        again.model_chunks[0],
        again.optimizer,
        again.scheduler,
        skip_load_to_model_and_opt=True,
    )
    assert found == (4, 2e15)
    assert run.state.consumed_train_samples == 24
    assert_equal(values(again), values(parts))


def test_nothing_to_load_is_iteration_0(run):
    assert checkpointing.load_checkpoint(make_parts().model_chunks, None, None) == (0, 0)


def test_not_strict_lets_keys_differ(run):
    parts = make_parts()
    checkpointing.save_checkpoint(4, parts.model_chunks, None, None, 0)
    del parts.model_chunks[0].counts
    with pytest.raises(CheckpointError, match="counts"):
        checkpointing.load_checkpoint(parts.model_chunks, None, None)
    assert checkpointing.load_checkpoint(parts.model_chunks, None, None, strict=False) == (4, 0)


def test_arguments_of_a_checkpoint(run, tmp_path):
    args = argparse.Namespace(
        load=str(tmp_path),
        ckpt_step=None,
        num_layers=None,
        use_tokenizer_model_from_checkpoint_args=True,
        use_mp_args_from_checkpoint_args=False,
    )
    assert checkpointing.load_args_from_checkpoint(args) == (args, None)
    checkpointing.save_checkpoint(4, make_parts().model_chunks, None, None, 0)
    _, saved = checkpointing.load_args_from_checkpoint(args)
    assert (args.num_layers, saved.num_layers) == (3, 3)


def test_names_of_folders_and_of_the_old_tree(run):
    base = checkpointing.get_checkpoint_name("/c", 12, return_base_dir=True)
    assert base == "/c/iter_0000012"
    assert checkpointing.get_checkpoint_name("/c", 12).endswith("/mp_rank_00/model_optim_rng.pt")
    assert checkpointing.get_checkpoint_name("/c", 12, release=True).startswith("/c/release/")
    tracker = checkpointing.get_checkpoint_tracker_filename("/c")
    assert tracker == "/c/latest_checkpointed_iteration.txt"


def test_names_of_files_follow_the_ranks_that_are_given(tmp_path):
    name = checkpointing.get_checkpoint_name
    assert name("/c", 12, False, True, 1, 2).endswith("/mp_rank_01_002/model_optim_rng.pt")
    assert name("/c", 12, False, True, 1, 2, True, 3, basename="x").endswith(
        "/mp_rank_01_002_003/x"
    )
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    with pytest.raises(CheckpointError, match="does not exist"):
        checkpointing.read_metadata(str(tracker))
    tracker.write_text("release")
    assert checkpointing.isfile(str(tracker))
    assert checkpointing.read_metadata(str(tracker)) == (0, True)
    assert checkpointing.find_checkpoint_rank_0(str(tmp_path), 3) is None
    file = tmp_path / "iter_0000003/mp_rank_00_000/model_optim_rng.pt"
    file.parent.mkdir(parents=True)
    file.touch()
    assert checkpointing.find_checkpoint_rank_0(str(tmp_path), 3) == str(file)
    assert checkpointing._get_checkpoint_format(str(file.parents[1])) == "torch"
    with pytest.raises(CheckpointError, match="not the folder of a checkpoint"):
        checkpointing._get_checkpoint_format(str(tmp_path))
