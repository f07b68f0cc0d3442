"""Which checkpoint is newer, the one that is kept or the short-lived one."""

from __future__ import annotations

import os

import pytest

from megatron.core.dist_checkpointing.folders import TRACKER
from megatron.training.checkpointing.load import load_run
from megatron.training.checkpointing.save import save_run
from megatron.training.checkpointing.transient import SUBFOLDER, transient
from tests.unit.checkpointing.tiny_run import counters, make_parts, options

GLOBAL = {"non_persistent_ckpt_type": "global"}


def save(root, iteration, *, short_lived=False, **more):
    config = options(root, **GLOBAL, **more)
    config = transient(config) if short_lived else config
    save_run(config, make_parts(), counters(iteration), asked={})


def loaded(root, **more):
    result = load_run(options(root, **{**GLOBAL, **more}), make_parts())
    return result and result.iteration


def test_the_newest_of_both_kinds_is_loaded_and_one_short_lived_is_kept(tmp_path):
    save(tmp_path, 2, short_lived=True)
    assert loaded(tmp_path) == 2
    save(tmp_path, 4)
    assert loaded(tmp_path) == 4
    save(tmp_path, 5, short_lived=True)
    save(tmp_path, 6, short_lived=True)
    assert loaded(tmp_path) == 6
    assert [path.name for path in (tmp_path / SUBFOLDER).glob("iter_*")] == ["iter_0000006"]
    assert loaded(tmp_path, ckpt_step=4) == 4
    assert loaded(tmp_path, non_persistent_ckpt_type=None) == 4


def test_a_directory_of_its_own(tmp_path):
    place = {"non_persistent_global_ckpt_dir": str(tmp_path / "fast")}
    save(tmp_path / "ck", 2, short_lived=True, **place)
    assert (tmp_path / "fast" / "iter_0000002").is_dir()
    assert not (tmp_path / "ck").exists()
    assert loaded(tmp_path / "ck", **place) == 2


@pytest.mark.parametrize("note", ["set back to 2"])
def test_after_the_tracker_was_set_back_only_what_followed_counts(tmp_path, note, capsys):
    for iteration in (2, 4):
        save(tmp_path, iteration)
    save(tmp_path, 5, short_lived=True)
    (tmp_path / TRACKER).write_text("2")
    assert loaded(tmp_path) == 2
    assert note in capsys.readouterr().out
    os.utime(tmp_path / TRACKER, ns=(0, 0))  # as if what follows came much later
    save(tmp_path, 3, short_lived=True)
    assert loaded(tmp_path) == 3
