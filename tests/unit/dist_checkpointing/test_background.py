"""A save that is written from copies while training goes on."""

from __future__ import annotations

import gc
import threading
import weakref
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron.core import device
from megatron.core.dist_checkpointing import all_ranks, background, commit, records
from megatron.core.dist_checkpointing.all_ranks import SaveFailed
from megatron.core.dist_checkpointing.background import (
    BackgroundSave,
    HostBuffer,
    copy_out,
    finish_apart,
    snapshot,
)
from megatron.core.dist_checkpointing.folders import choose
from megatron.core.dist_checkpointing.formats import SAFETENSORS_DIST, Contents
from megatron.core.dist_checkpointing.manifest import MANIFEST
from megatron.core.dist_checkpointing.reader import CheckpointReader
from megatron.core.dist_checkpointing.records import assign_replicas, from_param, to_write
from megatron.core.parallel.run_store import RunStore
from megatron.core.params.param_info import ParamInfo
from megatron.training.checkpointing.checkpointer import Checkpointer
from megatron.training.step import train_step
from tests.support import tiny_checkpoint
from tests.support.command_lines import run_of
from tests.support.small_run import small_run
from tests.support.tiny_checkpoint import global_tensors, names_in, shares


def contents(seed: int) -> tuple[Contents, list[torch.Tensor]]:
    """What a run may hold: shares, a half of one, a scalar, nothing, another dtype in the file."""
    local = shares(global_tensors(seed), 1, 0)
    wide = torch.randn(64, 33, generator=torch.Generator().manual_seed(seed)).t()
    empty = torch.empty(0, 5)
    tensors = [
        *tiny_checkpoint.records(local, 1, 0),
        from_param("wide", ParamInfo(global_shape=(33, 64)), wide),
        from_param("half", ParamInfo(global_shape=(33, 64)), wide, dtype=torch.bfloat16),
        from_param("empty", ParamInfo(global_shape=(0, 5)), empty),
    ]
    common = {"iteration": 1, "args": {}, "optimizer": {"steps": [seed]}}
    return Contents(tensors=tensors, rank_state={"rng_state": 7}, common=common), [
        *local.values(),
        wide,
    ]


def run_store() -> RunStore:
    return RunStore(dist.HashStore(), b"secret")


@pytest.fixture
def one_attempt(monkeypatch):
    monkeypatch.setattr(commit, "attempt_id", lambda: "same")
    monkeypatch.setattr(commit.time, "time_ns", lambda: 0)


def test_files_written_while_training_goes_on_are_those_of_a_save_at_once(tmp_path, one_attempt):
    """Byte for byte, manifest included, though the tensors changed before anything was written."""
    made, _ = contents(3)
    at_once = all_ranks.save(tmp_path / "at_once", 1, made, None).folder
    made, live = contents(3)
    gate = threading.Event()

    def write_when_open(*args, **kwargs):
        gate.wait()
        return SAFETENSORS_DIST.write_rank_files(*args, **kwargs)

    held_up = replace(SAFETENSORS_DIST, write_rank_files=write_when_open)
    begun = all_ranks.begin(tmp_path / "later", 1, made, None, format=held_up)
    saving = BackgroundSave(begun, HostBuffer(), None)
    saving.wait_for_copies()
    for tensor in live:
        tensor.fill_(torch.nan)
    made.common["optimizer"]["steps"].append(4)
    assert saving.poll() is None
    assert choose(tmp_path / "later") is None
    gate.set()
    later = saving.wait().folder
    names = sorted(path.name for path in at_once.iterdir())
    assert MANIFEST in names
    assert names == sorted(path.name for path in later.iterdir())
    for name in names:
        assert (at_once / name).read_bytes() == (later / name).read_bytes(), name


def test_buffers_and_values_are_copied_at_once_and_weights_before_an_update(tmp_path, monkeypatch):
    """A forward pass may change a buffer; the rest may still be live then, until the update."""
    counts, weight = torch.ones(4), torch.ones(4)
    info = ParamInfo(global_shape=(4,))
    tensors = [
        replace(from_param("counts", info, counts), is_buffer=True),
        from_param("weight", info, weight),
    ]
    gate = threading.Event()

    def copy_when_open(begun, buffer):
        gate.wait()
        return snapshot(begun, buffer)

    monkeypatch.setattr(background, "snapshot", copy_when_open)
    made = Contents(tensors=tensors, common={"iteration": 1})
    saving = BackgroundSave(all_ranks.begin(tmp_path, 1, made, None), HostBuffer(), None)
    counts.zero_()
    made.common["iteration"] = 2
    steps = []

    def step():
        steps.append(saving._copied.is_set())
        return False, None, None

    optimizer = SimpleNamespace(step=step)
    wait = saving.wait_for_copies

    def open_and_wait():
        gate.set()
        wait()

    saving.wait_for_copies = open_and_wait
    saves = Checkpointer(pending=saving)
    run = small_run(run_of(), checkpoints=saves, optimizer=optimizer, scheduler=object())
    train_step.update_parameters(run, train_step.next_batch(run))
    assert steps == [True]
    weight.zero_()
    with CheckpointReader(saving.wait().folder) as reader:
        assert reader.common() == {"iteration": 1}
        assert torch.equal(reader.read("counts"), torch.ones(4))
        assert torch.equal(reader.read("weight"), torch.ones(4))


def test_no_memory_for_the_copies_fails_the_save_and_nothing_else(tmp_path, monkeypatch):
    def no_memory(num_bytes):
        raise RuntimeError("not enough memory: you tried to allocate 9 bytes")

    monkeypatch.setattr(device, "host_memory", no_memory)
    begun = all_ranks.begin(tmp_path, 1, contents(3)[0], None)
    with pytest.raises(SaveFailed, match="rank 0: not enough memory"):
        BackgroundSave(begun, HostBuffer(), None).wait()
    assert not names_in(tmp_path)


def test_the_next_snapshot_uses_the_memory_of_the_one_before():
    buffer = HostBuffer()
    first = copy_out(contents(0)[0].tensors, buffer)
    second = copy_out(contents(1)[0].tensors, buffer)
    assert [p.data.data_ptr() for t in first for p in t.pieces] == [
        p.data.data_ptr() for t in second for p in t.pieces
    ]
    for copied, source in zip(second, contents(1)[0].tensors, strict=True):
        for copy, piece in zip(copied.pieces, source.pieces, strict=True):
            assert copy.data.dtype == source.dtype
            assert torch.equal(copy.data, piece.data.to(source.dtype)), source.key


def test_a_larger_snapshot_takes_more_memory_and_a_smaller_one_none():
    buffer = HostBuffer()
    (small,) = buffer.reserve([100])
    assert buffer.reserve([50])[0].data_ptr() == small.data_ptr()
    assert buffer.reserve([1 << 20])[0].numel() == 1 << 20


@pytest.mark.feature("Checkpoints: an asynchronous save allocates page-locked memory in blocks")
def test_blocks_of_a_snapshot_are_small_or_hold_one_tensor(monkeypatch):
    """torch would round one block of 96 GiB up to 128."""
    allocated = []
    monkeypatch.setattr(background, "_BLOCK_BYTES", 100)
    monkeypatch.setattr(
        background.device,
        "host_memory",
        lambda n: (allocated.append(n), torch.zeros(n, dtype=torch.uint8))[1],
    )
    buffer = HostBuffer()
    sizes = [40, 50, 20, 10, 150, 80]
    for i, place in enumerate(buffer.reserve(sizes)):
        place.fill_(i)
    assert allocated == [90, 30, 150, 80]
    again = buffer.reserve(sizes)
    assert [place.tolist() for place in again] == [[i] * size for i, size in enumerate(sizes)]
    buffer.reserve([*sizes, 30])
    assert allocated == [90, 30, 150, 80, 30]


def test_ranks_that_no_longer_meet_finish_a_save_or_say_why_not(tmp_path):
    pending = [
        BackgroundSave(all_ranks.begin(tmp_path, i, contents(3)[0], None), HostBuffer(), None)
        for i in (1, 2)
    ]
    store = run_store()
    finish_apart(None, store, 1, 2)  # that rank was not so far
    with pytest.raises(
        SaveFailed, match="iteration 1 was not saved.* rank 1: it had no pending save"
    ):
        finish_apart(pending[0], store, 0, 2)
    assert finish_apart(pending[1], run_store(), 0, 1).folder == choose(tmp_path).found.folder
    assert finish_apart(None, run_store(), 0, 1) is None


def test_ranks_wait_for_one_that_says_that_it_still_writes(tmp_path, monkeypatch):
    """Its disk is slower than their patience is long."""
    monkeypatch.setattr(background, "_PATIENCE_S", 0.2)
    monkeypatch.setattr(background, "_BEAT_S", 0.05)
    gate, beats = threading.Event(), 0

    def write_when_open(*args, **kwargs):
        gate.wait()
        return SAFETENSORS_DIST.write_rank_files(*args, **kwargs)

    class CountingStore(dist.HashStore):
        def add(self, key, count):
            nonlocal beats
            beats += count
            if beats == 20:
                gate.set()
            return super().add(key, count)

    store = RunStore(CountingStore(), b"secret")
    slow = replace(SAFETENSORS_DIST, write_rank_files=write_when_open)
    begun = all_ranks.begin(tmp_path, 1, contents(3)[0], None, format=slow)
    pending = BackgroundSave(begun, HostBuffer(), None)
    found = []
    waiting = threading.Thread(
        target=lambda: found.extend(background._wait_for_values(store, "verdict"))
    )
    waiting.start()
    saved = finish_apart(pending, store, 0, 1)
    waiting.join()
    assert saved is not None
    assert found[0]["folder"] == str(saved.folder)


def test_a_plan_is_computed_again_only_for_another_structure(tmp_path):
    made, _ = contents(3)
    plan = {}
    planned = []

    def counting(tensors):
        planned.append(len(tensors))
        return assign_replicas(tensors)

    fewer = replace(made, tensors=made.tensors[:-1])
    for iteration, chosen in enumerate((made, made, fewer, made), 1):
        with mock.patch.object(records, "assign_replicas", counting):
            begun = all_ranks.begin(tmp_path, iteration, chosen, None, plan=plan)
        assert begun.tensors == to_write(chosen.tensors)
    assert planned == [len(made.tensors), len(fewer.tensors), len(made.tensors)]


@pytest.fixture
def no_collections():
    """Without the collector, what is part of a reference cycle is never freed."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_a_finished_save_is_freed_without_the_garbage_collector(tmp_path, no_collections):
    """Else each save keeps its copies and its file contents until the next full collection."""
    made, _ = contents(3)
    saving = BackgroundSave(all_ranks.begin(tmp_path, 1, made, None), HostBuffer(), None)
    saving.wait()
    freed = [weakref.ref(saving), weakref.ref(saving._begun)]
    del saving
    assert [ref() for ref in freed] == [None, None]
