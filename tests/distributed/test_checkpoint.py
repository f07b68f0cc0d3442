"""Saving and loading over ranks: layouts, failures, kills."""

from __future__ import annotations

import os
import random
from pathlib import Path
from unittest import mock

import pytest
import torch

from megatron.core.config.errors import CheckpointDamaged, CheckpointError
from megatron.core.dist_checkpointing.all_ranks import SaveFailed
from megatron.core.dist_checkpointing.background import BackgroundSave, HostBuffer
from megatron.core.dist_checkpointing.folders import TRACKER, choose
from megatron.core.dist_checkpointing.reader import CheckpointReader
from megatron.training.checkpointing.load import load_run
from megatron.training.checkpointing.save import save_run
from tests.support import selection
from tests.support.ranks import run_ranks
from tests.support.tiny_checkpoint import names_in
from tests.support.tiny_run import (
    advance,
    assert_equal,
    counters,
    options,
    parts_of_layout,
    values,
)

LAYOUTS = [(1, 1), (2, 2), (2, 1), (4, 2), (4, 4)]  # (ranks, tensor parallel)


def save_after(rank, world_size, root, tp, num_steps):
    """Train and save; what this rank holds then."""
    parts = parts_of_layout(world_size, tp)
    advance(parts, num_steps)
    save_run(options(root), parts, counters(num_steps), asked={})
    return values(parts)


def load_and_compare(rank, world_size, root, tp, num_steps):
    """What was loaded is what this layout would have trained, bit for bit, moments too."""
    loaded = parts_of_layout(world_size, tp, seed=9)
    assert load_run(options(root), loaded).iteration == num_steps
    trained = parts_of_layout(world_size, tp)
    advance(trained, num_steps)
    assert_equal(values(loaded), values(trained))
    for parts in (loaded, trained):
        advance(parts, 2)
    assert_equal(values(loaded), values(trained))


@pytest.mark.parametrize(("ranks", "saved_tp"), selection.only(LAYOUTS[1::2], LAYOUTS))
def test_any_layout_loads_any_layout_weights_and_moments(tmp_path, ranks, saved_tp):
    run_ranks(save_after, ranks, tmp_path, saved_tp, 3)
    for world_size, tp in LAYOUTS:
        if (world_size, tp) != (ranks, saved_tp) or world_size == 2:
            run_ranks(load_and_compare, world_size, tmp_path, tp, 3)


def test_each_byte_is_written_once_and_the_replicas_share_the_work(tmp_path):
    run_ranks(save_after, 4, tmp_path, 2, 1)
    folder = tmp_path / "iter_0000001"
    with CheckpointReader(folder) as reader:
        pieces = [p for t in reader.tensors.values() for p in t.pieces]
        for name, stored in reader.tensors.items():
            boxes = [(p.offset, p.shape) for p in stored.pieces]
            assert len(set(boxes)) == len(boxes), name
    by_file = {}
    for piece in pieces:
        by_file[piece.file] = by_file.get(piece.file, 0) + piece.num_bytes
    assert sorted(by_file) == [f"__{rank}_0.safetensors" for rank in range(4)]
    assert max(by_file.values()) < 2 * min(by_file.values())


def load_once_for_all(rank, world_size, root, damaged_on):
    """Load by one read for all replicas: bytes this rank has read, or the error."""
    parts = parts_of_layout(world_size, 2, seed=9)
    num_read = 0
    read_box = CheckpointReader.read_box

    def counted(reader, key, offset, out):
        nonlocal num_read
        if rank == damaged_on:
            raise CheckpointDamaged(f"{key} is damaged")
        num_read += out.numel() * out.element_size()
        read_box(reader, key, offset, out)

    with mock.patch.object(CheckpointReader, "read_box", counted):
        try:
            load_run(options(root, ckpt_fully_parallel_load=True), parts)
        except CheckpointError as error:
            return str(error)
    trained = parts_of_layout(world_size, 2)
    advance(trained, 3)
    assert_equal(values(parts), values(trained))
    return num_read


@pytest.mark.feature("Checkpoints: replicas read each shard once and broadcast it")
def test_replicas_can_read_each_byte_once_between_them(tmp_path):
    run_ranks(save_after, 4, tmp_path, 2, 3)
    num_read = run_ranks(load_once_for_all, 4, tmp_path, None)
    with CheckpointReader(tmp_path / "iter_0000003") as reader:
        stored = sum(p.num_bytes for t in reader.tensors.values() for p in t.pieces)
    duplicates = sum(num_read) - stored  # read by every tensor-parallel rank that holds them
    assert 0 <= duplicates < stored / 10
    assert max(num_read) < 2 * min(num_read)


def test_a_rank_that_cannot_read_its_share_stops_the_load_everywhere(tmp_path):
    run_ranks(save_after, 4, tmp_path, 2, 3)
    messages = run_ranks(load_once_for_all, 4, tmp_path, 3)
    assert len(set(messages)) == 1
    assert "is damaged" in messages[0]


def save_in_background(config, parts, iteration):
    """What a run does over several steps, without the steps."""
    begun = []
    save_run(config, parts, counters(iteration), asked={}, go_on=begun.append)
    saving = BackgroundSave(begun[0], HostBuffer(), parts.groups.world)
    saving.wait_for_copies()
    advance(parts, 1)  # training goes on
    saving.wait()


def save_at_once(config, parts, iteration):
    save_run(config, parts, counters(iteration), asked={})
    advance(parts, 1)


def save_then_fail(rank, world_size, root, faults, save):
    """A good save, then one in which some rank fails; every rank must learn of it."""
    parts = parts_of_layout(world_size, 2)
    save_run(options(root), parts, counters(1), asked={})
    os.environ["FAULTS"] = faults
    with pytest.raises(SaveFailed) as caught:
        save(options(root), parts, 2)
    del os.environ["FAULTS"]
    assert choose(Path(root)).found.iteration == 1
    save_run(options(root), parts, counters(3), asked={})
    return str(caught.value)


@pytest.mark.feature("Checkpoints: a rank that cannot save stops the save on all ranks")
@pytest.mark.parametrize("save", [save_at_once, save_in_background])
@pytest.mark.parametrize(
    ("faults", "reason"),
    [
        ("save.tensor:enospc:rank1", "rank 1: .*No space left"),
        ("save.write:raise:rank1", "rank 1: injected"),
        ("save.written:raise", "rank 0: injected.*rank 1: injected"),
        ("save.begin:enospc:rank0", "No space left"),
        ("save.before_manifest:enospc:rank0", "rank 0: .*No space left"),
    ],
)
def test_one_rank_that_fails_makes_the_save_fail_everywhere(tmp_path, faults, reason, save):
    messages = run_ranks(save_then_fail, 2, tmp_path, faults, save)
    assert len(set(messages)) == 1
    with pytest.raises(SaveFailed, match=reason):
        raise SaveFailed(messages[0])
    assert names_in(tmp_path) == ["iter_0000001", "iter_0000003", TRACKER]


def save_for_ever(rank, world_size, root, first, faults, save):
    os.environ["FAULTS"] = faults
    parts = parts_of_layout(world_size, 2)
    loaded = load_run(options(root), parts)
    done = loaded.iteration if loaded else 0
    advance(parts, 1)
    for iteration in range(done + 1, first + 4):
        save(options(root, save_retain_interval=100), parts, iteration)
    return done


POINTS = ["save.write", "save.tensor", "save.written", "save.before_rename", "save.after_rename"]


@pytest.mark.parametrize(
    ("save", "points"),
    [(save_at_once, POINTS), (save_in_background, ["save.tensor", "save.after_rename"])],
)
def test_killing_one_rank_in_a_save_never_loses_the_last_checkpoint(tmp_path, save, points):
    rng = random.Random(0)
    done = 0
    for point in points:
        rank = 0 if "rename" in point else rng.randrange(2)
        step = done + 2
        faults = f"{point}:kill:rank{rank}:step{step}"
        with pytest.raises(AssertionError, match="SIGKILL"):
            run_ranks(save_for_ever, 2, tmp_path, done, faults, save, timeout_s=20)
        expected = step if point == "save.after_rename" else step - 1
        assert choose(tmp_path).found.iteration == expected
        run_ranks(load_and_compare, 1, tmp_path, 1, expected)
        done = expected
    run_ranks(save_for_ever, 2, tmp_path, done, "", save)
    assert choose(tmp_path).found.iteration == done + 3
    assert not list(tmp_path.glob("*.tmp-*"))


def load_damaged(rank, world_size, root):
    parts = parts_of_layout(world_size, 2)
    with pytest.raises(CheckpointError) as caught:
        load_run(options(root), parts)
    assert load_run(options(root, load_newest_valid=True), parts).iteration == 1
    return str(caught.value)


def test_damage_that_one_rank_finds_is_told_by_all(tmp_path):
    run_ranks(save_after, 2, tmp_path, 2, 1)
    run_ranks(save_after, 2, tmp_path, 2, 2)
    path = tmp_path / "iter_0000002" / "__1_0.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    messages = run_ranks(load_damaged, 2, tmp_path)
    assert len(set(messages)) == 1
    assert "__1_0.safetensors is damaged" in messages[0]


def random_after(rank, world_size, root, tp):
    """Random states continue in the same layout, and not in another."""
    parts = parts_of_layout(world_size, tp)
    torch.manual_seed(rank)
    torch.rand(rank + 1)
    save_run(options(root), parts, counters(1), asked={})
    expected = torch.rand(1)
    load_run(options(root), parts)
    return torch.equal(torch.rand(1), expected)


def test_each_rank_continues_its_own_random_numbers(tmp_path):
    assert run_ranks(random_after, 2, tmp_path, 2) == [True, True]


def random_of_first(rank, world_size, root):
    """Whether no rank takes its random state over where only the first has one."""
    parts = parts_of_layout(world_size, 2)
    save_run(options(root), parts, counters(1), asked={})
    states = CheckpointReader.rank_state
    torch.manual_seed(7)
    expected = torch.get_rng_state()
    with mock.patch.object(
        CheckpointReader, "rank_state", lambda reader, n: None if n else states(reader, n)
    ):
        load_run(options(root), parts)
    return torch.equal(torch.get_rng_state(), expected)


def test_random_states_of_some_ranks_are_taken_over_by_none(tmp_path):
    assert run_ranks(random_of_first, 2, tmp_path) == [True, True]
