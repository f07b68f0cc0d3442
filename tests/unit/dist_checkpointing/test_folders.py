"""Which checkpoint of a directory is loaded."""

from __future__ import annotations

import errno
import io
import json
import os

import pytest

from megatron.core.config.errors import CheckpointError
from megatron.core.dist_checkpointing import commit
from megatron.core.dist_checkpointing.all_ranks import save
from megatron.core.dist_checkpointing.folders import (
    TRACKER,
    Retention,
    choose,
    published,
    read_tracker,
)
from megatron.core.dist_checkpointing.formats import Contents
from megatron.core.dist_checkpointing.manifest import _checksum
from tests.support.tiny_checkpoint import names_in, publish_model


def chosen(root):
    choice = choose(root)
    return choice and choice.found.iteration


def set_tracker(root, text, *, ns=None):
    (root / TRACKER).write_text(text)
    if ns is not None:
        os.utime(root / TRACKER, ns=(ns, ns))


def tracker_as_before_the_newest(root):
    """Put the tracker back as it was when the newest save began: a kill before the last step."""
    text, ns = published(root)[0].manifest.tracker_before
    set_tracker(root, text, ns=ns)


def test_an_empty_or_absent_directory_holds_nothing(tmp_path):
    assert choose(tmp_path) is None
    assert choose(tmp_path / "nowhere") is None


def test_the_newest_is_loaded_and_the_tracker_names_it(tmp_path):
    for iteration in (5, 10):
        publish_model(tmp_path, iteration)
    assert (tmp_path / TRACKER).read_text() == "10"
    choice = choose(tmp_path)
    assert choice.found.iteration == 10
    assert choice.note is None
    assert [found.iteration for found in choice.older] == [5]


def test_a_tracker_that_lags_behind_a_finished_publish_is_passed_over(tmp_path):
    for iteration in (5, 10):
        publish_model(tmp_path, iteration)
    tracker_as_before_the_newest(tmp_path)
    choice = choose(tmp_path)
    assert choice.found.iteration == 10
    assert "lags behind at 5" in choice.note
    assert "iter_0000010" in choice.note


def test_a_tracker_that_lags_is_known_also_in_a_copy_without_times(tmp_path):
    for iteration in (5, 10):
        publish_model(tmp_path, iteration)
    newest = published(tmp_path)[0].manifest
    set_tracker(tmp_path, "5", ns=newest.published_at_ns - 1)
    assert chosen(tmp_path) == 10


def test_a_tracker_nobody_touched_lags_whatever_the_file_server_s_clock_says(tmp_path):
    publish_model(tmp_path, 5)
    in_the_future = published(tmp_path)[0].manifest.published_at_ns + 10**12
    set_tracker(tmp_path, "5", ns=in_the_future)
    publish_model(tmp_path, 10)
    tracker_as_before_the_newest(tmp_path)
    assert chosen(tmp_path) == 10


def test_the_first_save_needs_no_tracker(tmp_path):
    publish_model(tmp_path, 5)
    (tmp_path / TRACKER).unlink()
    choice = choose(tmp_path)
    assert choice.found.iteration == 5
    assert "no tracker file" in choice.note


@pytest.mark.parametrize("text", ["5", "10"])
def test_a_tracker_set_back_is_obeyed_and_both_steps_are_told(tmp_path, text):
    for iteration in (5, 10, 15):
        publish_model(tmp_path, iteration)
    set_tracker(tmp_path, text)
    choice = choose(tmp_path)
    assert choice.found.iteration == int(text)
    assert f"set back to {text}" in choice.note
    assert "iter_0000015" in choice.note


def test_after_going_back_the_newest_publish_counts_not_the_highest_iteration(tmp_path):
    for iteration in (5, 10):
        publish_model(tmp_path, iteration)
    set_tracker(tmp_path, "5")
    publish_model(tmp_path, 7)
    assert chosen(tmp_path) == 7
    tracker_as_before_the_newest(tmp_path)
    assert chosen(tmp_path) == 7
    assert [found.iteration for found in published(tmp_path)] == [7, 10, 5]


def test_a_step_saved_twice_is_the_second_one(tmp_path):
    publish_model(tmp_path, 5, seed=1)
    publish_model(tmp_path, 10, seed=1)
    set_tracker(tmp_path, "5")
    publish_model(tmp_path, 10, seed=2)
    assert [found.iteration for found in published(tmp_path)] == [10, 5]
    assert published(tmp_path)[0].manifest.sequence == 3


def test_unpublished_folders_are_skipped(tmp_path):
    publish_model(tmp_path, 5)
    publish_model(tmp_path, 10)
    (tmp_path / "iter_0000010").rename(tmp_path / "iter_0000010.tmp-x")
    set_tracker(tmp_path, "5")
    (tmp_path / "iter_0000020").mkdir()  # somebody else's
    (tmp_path / "notes").mkdir()
    assert chosen(tmp_path) == 5


def test_a_checkpoint_moved_aside_counts_until_its_successor_is_there(tmp_path):
    publish_model(tmp_path, 5)
    (tmp_path / "iter_0000005").rename(tmp_path / "iter_0000005.old-x")
    assert choose(tmp_path).found.folder.name == "iter_0000005.old-x"
    publish_model(tmp_path, 10)
    assert names_in(tmp_path) == [
        "iter_0000005",
        "iter_0000010",
        TRACKER,
    ]


def test_a_damaged_manifest_does_not_hide_the_checkpoint(tmp_path):
    for iteration in (5, 10):
        publish_model(tmp_path, iteration)
    (tmp_path / "iter_0000010" / "metadata.json").write_text("{")
    choice = choose(tmp_path)
    assert choice.found.iteration == 10
    assert "metadata.json is damaged" in str(choice.found.problem)
    assert [found.iteration for found in choice.older] == [5]


def test_a_damaged_old_manifest_does_not_come_before_newer_ones(tmp_path):
    for iteration in (5, 10, 15):
        publish_model(tmp_path, iteration)
    (tmp_path / "iter_0000010" / "metadata.json").write_text("{")
    assert [found.iteration for found in published(tmp_path)] == [15, 10, 5]


def unreadable(path):
    """Ways in which a manifest cannot be read, one after the other."""
    whole = path.read_bytes()
    path.unlink()
    path.mkdir()
    yield "Is a directory"
    path.rmdir()
    path.symlink_to(path)
    yield "symbolic links"
    path.unlink()
    path.write_text("[" * 100_000)
    yield "is no JSON"
    path.write_text(json.dumps(body_of(whole) | {"version": {}}))
    yield "checksum"
    for changed in ({"version": None}, {"files": [1]}, {"files": {"a": {}}}, {"sequence": "1"}):
        write_signed(path, body_of(whole) | changed)
        yield "is damaged"
    for field in ("iteration", "layout", "version"):
        write_signed(path, {k: v for k, v in body_of(whole).items() if k != field})
        yield "is damaged"
    path.write_bytes(whole)


def body_of(manifest: bytes):
    return {k: v for k, v in json.loads(manifest).items() if k != "crc32"}


def write_signed(path, body):
    """A manifest of other content, whose checksum fits."""
    path.write_text(json.dumps(body | {"crc32": _checksum(body)}))


@pytest.mark.feature("Checkpoints: an old one that cannot be read blocks neither saves nor loads")
def test_an_old_manifest_that_cannot_be_read_is_reported_once_and_blocks_nothing(tmp_path):
    made = Contents(tensors=[], common={})
    for iteration in (1, 2, 3):
        save(tmp_path, iteration, made, None)
    manifest = tmp_path / "iter_0000002" / "metadata.json"
    for iteration, reason in enumerate(unreadable(manifest), start=4):
        commit._reported.clear()
        choice = choose(tmp_path)
        assert (choice.found.iteration, choice.note) == (iteration - 1, None)
        (problem,) = (found.problem for found in choice.older if found.problem)
        assert str(manifest) in str(problem)
        assert reason in str(problem)
        told = [
            save(tmp_path, iteration, made, None, retention=Retention(last=2)).warnings
            for _ in range(2)
        ]
        assert told == [(f"{problem}; this checkpoint is skipped and stays",), ()]
        assert manifest.parent.is_dir()


def test_a_newest_manifest_that_cannot_be_read_is_an_error_that_one_can_go_behind(tmp_path):
    for iteration in (5, 10):
        publish_model(tmp_path, iteration)
    for reason in unreadable(tmp_path / "iter_0000010" / "metadata.json"):
        choice = choose(tmp_path)
        assert choice.found.iteration == 10
        assert reason in str(choice.found.problem)
        assert [found.iteration for found in choice.older] == [5]


def test_a_folder_that_is_a_link_in_a_circle_blocks_nothing(tmp_path):
    publish_model(tmp_path, 5)
    (tmp_path / "iter_0000002").symlink_to(tmp_path / "iter_0000002")
    (tmp_path / "iter_0000003").symlink_to(tmp_path / "nowhere")
    publish_model(tmp_path, 6)
    assert [found.iteration for found in published(tmp_path)] == [6, 5, 2]


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE])
def test_a_folder_that_the_file_system_cannot_read_is_not_missing(tmp_path, monkeypatch, code):
    for iteration in (5, 10):
        publish_model(tmp_path, iteration)
    (tmp_path / "iter_0000007").write_text("a file, no folder")
    folder = str(tmp_path / "iter_0000010")

    def failing(function):
        def call(path, *args, **kwargs):
            if str(path).startswith(folder):
                raise OSError(code, os.strerror(code), str(path))
            return function(path, *args, **kwargs)

        return call

    monkeypatch.setattr(os, "stat", failing(os.stat))
    monkeypatch.setattr(io, "open", failing(io.open))
    choice = choose(tmp_path)
    assert choice.found.iteration == 10
    assert os.strerror(code) in str(choice.found.problem)
    assert [found.iteration for found in choice.older] == [5]


def test_a_damaged_step_of_an_abandoned_course_does_not_hide_a_tracker_that_lags(tmp_path):
    for iteration in (5, 10):
        publish_model(tmp_path, iteration)
    set_tracker(tmp_path, "10")
    publish_model(tmp_path, 7)
    tracker_as_before_the_newest(tmp_path)
    (tmp_path / "iter_0000010" / "metadata.json").write_text("{")
    choice = choose(tmp_path)
    assert choice.found.iteration == 7
    assert "lags behind at 10" in choice.note


def test_a_step_asked_for_is_found_or_the_published_ones_are_listed(tmp_path):
    for iteration in (5, 10):
        publish_model(tmp_path, iteration)
    assert choose(tmp_path, step=5).found.iteration == 5
    assert choose(tmp_path, step=5).older == ()
    with pytest.raises(CheckpointError, match=r"--ckpt-step 6 names .*published iterations: 10, 5"):
        choose(tmp_path, step=6)


def test_a_tracker_that_names_nothing_is_an_error(tmp_path):
    publish_model(tmp_path, 5)
    set_tracker(tmp_path, "6")
    with pytest.raises(CheckpointError, match=r"txt names .*iter_0000006, which is not there"):
        choose(tmp_path)
    choice = choose(tmp_path, lenient=True)
    assert choice.found.iteration == 5
    assert "which is not there" in choice.note


def test_the_tracker_may_name_a_release_or_a_folder_of_another_format(tmp_path):
    (tmp_path / "release").mkdir()
    set_tracker(tmp_path, "release\n")
    assert choose(tmp_path).found.iteration is None
    (tmp_path / "iter_0000003").mkdir()
    set_tracker(tmp_path, "3")
    found = choose(tmp_path).found
    assert (found.iteration, found.manifest, found.problem) == (3, None, None)


@pytest.mark.parametrize(
    "text", ["", "0", "-1", "latest", "5.0", "\xff", "9" * 5000, "1" * 19, "\N{SUPERSCRIPT TWO}"]
)
def test_a_tracker_of_nonsense_is_an_error_with_its_content(tmp_path, text):
    (tmp_path / TRACKER).write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match="neither an iteration above 0 nor the word release"):
        read_tracker(tmp_path)


def test_a_tracker_that_cannot_be_read_is_an_error_that_one_can_go_behind(tmp_path):
    publish_model(tmp_path, 5)
    (tmp_path / TRACKER).unlink()
    (tmp_path / TRACKER).mkdir()
    with pytest.raises(CheckpointError, match=r"iteration\.txt cannot be read: Is a directory"):
        choose(tmp_path)
    assert choose(tmp_path, lenient=True).found.iteration == 5
