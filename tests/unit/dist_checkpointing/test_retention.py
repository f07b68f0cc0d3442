"""Which checkpoints go when a new one is published."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.core.config.errors import CheckpointDamaged
from megatron.core.dist_checkpointing.all_ranks import save
from megatron.core.dist_checkpointing.folders import (
    KEEP_ALL,
    TRACKER,
    CheckpointFolder,
    Retention,
    choose,
    published,
)
from megatron.core.dist_checkpointing.formats import Contents
from megatron.core.dist_checkpointing.manifest import MANIFEST
from tests.support.tiny_checkpoint import names_in


def order(*iterations: int, damaged: tuple[int, ...] = ()) -> list[CheckpointFolder]:
    return [
        CheckpointFolder(
            Path(str(i)), i, problem=CheckpointDamaged("cut") if i in damaged else None
        )
        for i in iterations
    ]


@pytest.mark.parametrize(
    ("retention", "found", "doomed"),
    [
        (KEEP_ALL, order(30, 20, 10), []),
        (Retention(last=1), order(30, 20, 10), [20, 10]),
        (Retention(last=2), order(30, 20, 10), [10]),
        (Retention(last=4), order(30, 20, 10), []),
        (Retention(last=1, multiples_of=20), order(50, 40, 30, 20, 10), [30, 10]),
        (Retention(multiples_of=20), order(50, 30, 10), [30]),
        (Retention(multiples_of=20), order(50, 40, 10), []),
        (Retention(last=1), order(10), []),
        (Retention(last=1, best=20), order(40, 30, 20, 10), [30, 10]),
        (Retention(multiples_of=20, best=30), order(50, 30, 10), []),
        # somebody went back from 90 to 10: the newest is the one published last
        (Retention(last=2), order(20, 90, 10), [10]),
        # a damaged one is not what one goes back to
        (Retention(last=2), order(40, 30, 20, 10, damaged=(30,)), [10]),
        (Retention(last=2), order(40, 30, damaged=(30,)), []),
    ],
)
def test_what_may_go(retention, found, doomed):
    assert [f.iteration for f in retention.select_expired(found)] == doomed


def contents(iteration: int) -> Contents:
    return Contents(tensors=[], common={"iteration": iteration, "args": {}})


def test_a_delete_that_was_killed_is_finished_by_the_next_save(tmp_path, monkeypatch):
    keep_1 = Retention(last=1)
    for iteration in (1, 2):
        save(tmp_path, iteration, contents(iteration), None)
    monkeypatch.setenv("FAULTS", "save.before_delete:raise:times1,save.in_delete:raise:times1")
    first = save(tmp_path, 3, contents(3), None, retention=keep_1)
    assert first.deleted == ()
    assert "iter_0000002 could not be deleted: injected" in first.warnings[0]
    assert len(list(tmp_path.glob("*.del-*"))) == 1
    assert save(tmp_path, 4, contents(4), None, retention=keep_1).deleted == (3, 2)
    assert names_in(tmp_path) == ["iter_0000004", TRACKER]


def test_the_checkpoint_just_published_stays_whatever_else_is_damaged(tmp_path):
    for iteration in (1, 2):
        folder = save(tmp_path, iteration, contents(iteration), None).folder
        (folder / MANIFEST).write_text("{")
    save(tmp_path, 3, contents(3), None, retention=Retention(last=1))
    assert choose(tmp_path).found.iteration == 3
    assert [found.iteration for found in published(tmp_path)] == [3, 2, 1]
    save(tmp_path, 4, contents(4), None, retention=Retention(last=1))
    assert [found.iteration for found in published(tmp_path)] == [4, 2, 1]
