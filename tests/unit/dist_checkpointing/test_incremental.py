"""Tensors that nobody trains are written once."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron.core.config.errors import CheckpointDamaged
from megatron.training.checkpointing.checkpoint_tensors import RunParts
from megatron.training.checkpointing.load import load_run
from megatron.training.checkpointing.save import save_run
from tests.support.tiny_checkpoint import read_all
from tests.support.tiny_run import (
    Optimizer,
    advance,
    assert_equal,
    counters,
    make_parts,
    options,
    values,
)

FROZEN = "__0_1.safetensors"


def partly_frozen(seed: int) -> RunParts:
    """A run that does not train its embedding and a bias."""
    made = make_parts(seed=seed)
    model = made.model_chunks[0]
    for param in (model.embedding_weight, model.layers_0_gated_bias):
        param.requires_grad_(False)
    return replace(made, optimizer=Optimizer(model))


@pytest.fixture
def parts() -> RunParts:
    return partly_frozen(0)


def save(root, parts, iteration, **more) -> Path:
    config = options(root, ckpt_incremental=True, **more)
    return save_run(config, parts, counters(iteration), asked={}).folder


def is_one_file(*folders: Path) -> bool:
    return len({os.stat(folder / FROZEN).st_ino for folder in folders}) == 1


@pytest.mark.feature("Checkpoints: weights that are not trained are written once and linked")
def test_what_is_not_trained_is_linked_and_what_is_loaded_is_the_same(tmp_path, parts):
    folders = []
    for iteration in (1, 2, 3):
        advance(parts, 1)
        folders.append(save(tmp_path, parts, iteration))
    assert is_one_file(*folders)
    assert folders[0].joinpath("__0_0.safetensors").stat().st_nlink == 1
    resumed = partly_frozen(5)
    assert load_run(options(tmp_path), resumed).iteration == 3
    assert_equal(values(resumed), values(parts))


def test_a_change_of_one_bit_is_written(tmp_path, parts):
    first = save(tmp_path, parts, 1)
    with torch.no_grad():
        parts.model_chunks[0].embedding_weight.view(torch.int32)[3, 2] ^= 1
    second = save(tmp_path, parts, 2)
    assert not is_one_file(first, second)
    old, new = (read_all(folder)["embedding.weight"] for folder in (first, second))
    assert torch.equal(new, parts.model_chunks[0].embedding_weight[:10])
    assert not torch.equal(old, new)


def test_another_set_of_frozen_weights_is_written(tmp_path, parts):
    first = save(tmp_path, parts, 1)
    parts.model_chunks[0].layers_0_norm_weight.requires_grad_(False)
    assert not is_one_file(first, save(tmp_path, parts, 2))


def test_what_the_retention_deletes_stays_in_later_checkpoints(tmp_path, parts):
    for iteration in (1, 2, 3):
        last = save(tmp_path, parts, iteration, keep_last_checkpoints=1)
    assert [path.name for path in tmp_path.glob("iter_*")] == ["iter_0000003"]
    assert os.stat(last / FROZEN).st_nlink == 1
    resumed = partly_frozen(5)
    load_run(options(tmp_path), resumed)
    assert_equal(values(resumed), values(parts))


def test_damage_of_a_linked_file_is_found_in_every_checkpoint_that_has_it(tmp_path, parts):
    folders = [save(tmp_path, parts, iteration) for iteration in (1, 2)]
    path = folders[1] / FROZEN
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    for folder in folders:
        with pytest.raises(CheckpointDamaged, match=FROZEN):
            read_all(folder)


@pytest.mark.parametrize("cut", [FROZEN, "index.json", "metadata.json"])
def test_nothing_is_linked_from_a_checkpoint_that_is_not_whole(tmp_path, parts, cut):
    first = save(tmp_path, parts, 1)
    (first / cut).write_bytes((first / cut).read_bytes()[:-1])
    second = save(tmp_path, parts, 2)
    assert not is_one_file(first, second)
    read_all(second)


def test_a_file_system_without_links_gets_copies(tmp_path, parts, monkeypatch):
    def no_links(source, target):
        raise PermissionError(1, "Operation not permitted")

    first = save(tmp_path, parts, 1)
    monkeypatch.setattr(os, "link", no_links)
    second = save(tmp_path, parts, 2)
    assert not is_one_file(first, second)
    read_all(second)
