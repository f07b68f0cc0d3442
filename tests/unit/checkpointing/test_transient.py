"""Which checkpoint is newer, the one that is kept or the short-lived one."""

from __future__ import annotations

import os

import pytest

from megatron.core.dist_checkpointing import commit
from megatron.core.dist_checkpointing.all_ranks import SaveFailed
from megatron.core.dist_checkpointing.all_ranks import save as publish
from megatron.core.dist_checkpointing.folders import TRACKER
from megatron.core.dist_checkpointing.formats import Contents
from megatron.core.dist_checkpointing.local import find_local, part_root, part_roots
from megatron.core.dist_checkpointing.manifest import SAVE
from megatron.training.checkpointing.load import load_run
from megatron.training.checkpointing.non_persistent import SUBFOLDER, transient
from megatron.training.checkpointing.save import save_run
from tests.support.tiny_run import Alone, counters, make_parts, options

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


def test_a_tracker_that_cannot_be_read_is_passed_over_with_short_lived_ones_too(tmp_path):
    save(tmp_path, 4)
    (tmp_path / TRACKER).write_text("9" * 5000)
    assert loaded(tmp_path, load_newest_valid=True) == 4


@pytest.mark.parametrize("kind", ["kept", "short-lived"])
def test_a_run_that_has_not_saved_yet_is_refused_once_its_successor_has(
    tmp_path, kind, monkeypatch
):
    """It claims its directories when it starts, though it hangs before its first save."""
    short_lived = kind == "short-lived"
    save(tmp_path, 1, short_lived=short_lived)
    monkeypatch.setattr(commit, "_claimed", {})
    assert loaded(tmp_path) == 1
    of_the_first = commit._claimed
    monkeypatch.setattr(commit, "_claimed", {})
    assert loaded(tmp_path) == 1
    save(tmp_path, 2, short_lived=short_lived)
    monkeypatch.setattr(commit, "_claimed", of_the_first)
    with pytest.raises(SaveFailed, match="iter_0000002 was published by a run that started later"):
        save(tmp_path, 3, short_lived=short_lived)


def test_a_run_that_only_loads_writes_nothing(tmp_path):
    save(tmp_path, 4)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path, *tmp_path.rglob("*"))}
    commit._claimed.clear()
    assert loaded(tmp_path, save=None) == 4
    assert {path: path.stat().st_mtime_ns for path in (tmp_path, *tmp_path.rglob("*"))} == before


def test_names_beside_local_parts_are_left_alone(tmp_path):
    layout = {"world_size": 1}
    made = Contents(tensors=[], common={}, layout=layout | {SAVE: [1, "a"]})
    publish(part_root(tmp_path, 0), 3, made, None)
    of_another_kind = Contents(tensors=[], common={}, layout=layout | {SAVE: 7})
    publish(part_root(tmp_path, 1), 3, of_another_kind, None)
    for name in ("rank_00000.bak", "rank_", "rank_0", "rank_x"):
        (tmp_path / name).mkdir()
    (tmp_path / "rank_00002").touch()
    assert [rank for rank, _ in part_roots(tmp_path)] == [0, 1]
    found, notes = find_local(tmp_path, layout, 0, Alone())
    assert (found.iteration, list(found.parts), notes) == (3, [0], [])
