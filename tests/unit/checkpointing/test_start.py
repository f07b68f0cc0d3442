"""Commands that start from the weights of another checkpoint, and continue when repeated."""

from __future__ import annotations

import dataclasses
import shutil

import pytest

from megatron.core.config.errors import CheckpointError
from megatron.core.dist_checkpointing.folders import TRACKER
from megatron.training.checkpointing.load import load_run
from megatron.training.checkpointing.non_persistent import transient
from megatron.training.checkpointing.save import save_run
from tests.support.tiny_run import (
    advance,
    assert_equal,
    counters,
    make_parts,
    options,
    values,
)

STARTS = {
    "--finetune": {"finetune": True},
    "--finetune --ckpt-step": {"finetune": True, "ckpt_step": 3},
    "--finetune --no-load-optim": {"finetune": True, "no_load_optim": True, "no_load_rng": True},
    "--pretrained-checkpoint alone": {"load": None, "pretrained_checkpoint": "base"},
    "a release": {"load": "release"},
}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The current folder: `base` holds a run of 3 steps, `release` its weights."""
    monkeypatch.chdir(tmp_path)
    parts = make_parts()
    advance(parts, 3)
    save("base", parts, 3)
    shutil.copytree("base", "release")
    (tmp_path / "release" / "iter_0000003").rename(tmp_path / "release" / "release")
    (tmp_path / "release" / TRACKER).write_text("release")
    return tmp_path


def save(root, parts, iteration, **more):
    save_run(options(root, **more), parts, counters(iteration), asked={})


def start(**more):
    """Return the flags of a run that starts from `base` and saves to `tuned`."""
    return options("tuned", **{"load": "base", **more})


def begin(config):
    """Start a run, train it 5 steps, save it; return its parts."""
    parts = make_parts(seed=4)
    loaded = load_run(config, parts)
    assert loaded.iteration == 0
    assert parts.optimizer.num_steps == 0
    parts = dataclasses.replace(parts, started_from=loaded.started_from)
    advance(parts, 5)
    save_run(config, parts, counters(5), asked={})
    return parts


@pytest.mark.parametrize("name", STARTS)
def test_the_command_that_started_a_run_continues_it(place, name, capsys):
    config = start(**STARTS[name])
    begun = begin(config)
    out = capsys.readouterr().out
    assert f" starting from the weights in {place}/" in out
    assert "the same command continues the run from --save tuned" in out
    parts = make_parts(seed=6)
    loaded = load_run(config, parts)
    assert (loaded.iteration, loaded.counters) == (5, counters(5))
    assert_equal(values(parts), values(begun))
    assert " continuing the run in --save tuned, which started from " in capsys.readouterr().out
    assert loaded.started_from == begun.started_from  # so that its next checkpoints say so too


def test_a_checkpoint_of_a_run_that_started_elsewhere_is_not_overwritten(place):
    save("tuned", make_parts(), 9)
    with pytest.raises(CheckpointError) as error:
        load_run(start(finetune=True), make_parts())
    assert "tuned/iter_0000009 belongs to another run" in str(error.value)
    assert f"this run starts from {place}/base/iter_0000003" in str(error.value)
    assert "give --load tuned without --finetune; otherwise give another --save" in str(error.value)
    assert load_run(options("tuned"), make_parts()).iteration == 9


def test_a_run_is_not_continued_after_its_start_has_been_trained_further(place):
    config = start(finetune=True)
    begin(config)
    save("base", make_parts(), 4)
    with pytest.raises(CheckpointError, match=r"started from .*iter_0000003; this .*iter_0000004"):
        load_run(config, make_parts())
    assert load_run(start(finetune=True, ckpt_step=3), make_parts()).iteration == 5


def test_a_resume_from_another_directory_is_repeated_from_there(place, capsys):
    assert load_run(start(), make_parts()).iteration == 3
    save("tuned", make_parts(), 9)
    assert load_run(start(), make_parts()).iteration == 3
    said = capsys.readouterr().out
    assert "resuming from --load base; the same command resumes from there again" in said


def test_finetuning_in_one_directory_starts_again_from_its_newest_weights(place, capsys):
    config = options("base", finetune=True)
    for _ in range(2):
        assert load_run(config, make_parts()).iteration == 0
        assert "to continue the run, omit --finetune" in capsys.readouterr().out


def test_a_program_that_does_not_train_loads_what_it_is_told_to(place):
    config = start(finetune=True)
    begun = begin(config)
    parts = dataclasses.replace(make_parts(seed=6), optimizer=None, scheduler=None)
    assert load_run(config, parts).iteration == 0
    begun_weights = begun.model_chunks[0].state_dict()
    base = make_parts()
    load_run(options("base"), base)
    assert_equal(parts.model_chunks[0].state_dict(), base.model_chunks[0].state_dict())
    assert begun_weights.keys() == parts.model_chunks[0].state_dict().keys()


def test_a_damaged_newest_checkpoint_of_the_run_is_passed_over_if_asked_for(place):
    config = start(finetune=True)
    parts = begin(config)
    advance(parts, 1)
    save_run(config, parts, counters(6), asked={})
    (place / "tuned" / "iter_0000006" / "common.json").write_text("{")
    with pytest.raises(CheckpointError, match="common.json"):
        load_run(config, make_parts())
    lenient = dataclasses.replace(config, load_newest_valid=True)
    assert load_run(lenient, make_parts()).iteration == 5


@pytest.mark.parametrize("kind", ["global", "local"])
def test_a_run_that_has_only_non_persistent_checkpoints_is_continued(place, kind, capsys):
    more = {"non_persistent_ckpt_type": kind, "non_persistent_local_ckpt_dir": "node"}
    config = start(finetune=True, **more)
    parts = make_parts(seed=4)
    parts = dataclasses.replace(parts, started_from=load_run(config, parts).started_from)
    advance(parts, 2)
    brief = transient(config)
    save_run(brief, parts, counters(2), asked={}, is_local=kind == "local")
    again = make_parts(seed=6)
    assert load_run(config, again).iteration == 2
    assert_equal(values(again), values(parts))
    if kind == "local":
        other = dataclasses.replace(config, load="release", save="other")
        assert load_run(other, make_parts()).iteration == 0
        assert "is of another run: it is not loaded" in capsys.readouterr().out
