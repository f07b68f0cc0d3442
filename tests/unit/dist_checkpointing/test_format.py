"""Files of a checkpoint: bytes, layouts, checksums."""

from __future__ import annotations

import json
import os
import random
import shutil
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.core.config.errors import CheckpointDamaged, CheckpointError
from megatron.core.dist_checkpointing import safetensors_file
from megatron.core.dist_checkpointing.formats import merge_index
from megatron.core.dist_checkpointing.manifest import MANIFEST, read_manifest, write_manifest
from megatron.core.dist_checkpointing.reader import CheckpointReader
from megatron.core.dist_checkpointing.records import (
    LazyPiece,
    ParamInfo,
    TensorRecord,
    from_param,
)
from megatron.core.dist_checkpointing.safetensors_file import (
    DTYPE_NAMES,
    LazyTensor,
    TensorEntry,
    read_header,
    write_file,
)
from tests.support.tiny_checkpoint import (
    global_tensors,
    publish_model,
    publish_ranks,
    read_all,
    records,
    shares,
)

safetensors = pytest.importorskip("safetensors", reason="compares with the library's reader")


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 64 bytes, so that small tensors have several."""
    monkeypatch.setattr(safetensors_file, "BLOCK_BYTES", 64)
    monkeypatch.setattr("megatron.core.dist_checkpointing.formats.BLOCK_BYTES", 64)


def sample(dtype: torch.dtype) -> torch.Tensor:
    bits = torch.randint(0, 2, (3, 5, dtype.itemsize), dtype=torch.uint8)
    if dtype is torch.bool:
        return bits[..., 0].bool()
    return torch.randint(0, 256, (3, 5 * dtype.itemsize), dtype=torch.uint8).view(dtype)


def test_every_dtype_comes_back_bit_for_bit(tmp_path):
    tensors = {name: sample(dtype) for dtype, name in DTYPE_NAMES.items()}
    held = [from_param(n, ParamInfo(global_shape=tuple(t.shape)), t) for n, t in tensors.items()]
    found = read_all(publish_ranks(tmp_path, 1, [held]))
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8))


def test_the_safetensors_library_reads_the_files(tmp_path):
    whole = global_tensors()
    folder = publish_model(tmp_path, 1, tp=1)
    with safetensors.safe_open(folder / "__0_0.safetensors", framework="pt") as file:
        assert file.metadata()["iteration"] == "1"
        keys = list(file.keys())
        assert torch.equal(file.get_tensor("layers.0.proj.weight"), whole["layers.0.proj.weight"])
        assert torch.equal(file.get_tensor("temperature"), whole["temperature"])
    assert sorted(keys) == sorted(whole)
    folder = publish_model(tmp_path, 2, tp=2)
    with safetensors.safe_open(folder / "__1_0.safetensors", framework="pt") as file:
        box = file.get_tensor("layers.0.gated.weight[12:16,0:8]")
    assert torch.equal(box, whole["layers.0.gated.weight"][12:])


def test_elements_are_aligned_and_tensors_lie_end_to_end(tmp_path):
    tensors = [("b", torch.zeros(3, dtype=torch.uint8)), ("a", torch.zeros(2, dtype=torch.int64))]
    held = [from_param(n, ParamInfo(global_shape=tuple(t.shape)), t) for n, t in tensors]
    folder = publish_ranks(tmp_path, 1, [held])
    header = read_header(folder / "__0_0.safetensors")
    begin = header["a"].start
    assert header["a"] == TensorEntry(torch.int64, (2,), begin, 16)
    assert header["b"] == TensorEntry(torch.uint8, (3,), begin + 16, 3)


def test_a_file_that_is_not_safetensors_is_named(tmp_path):
    (tmp_path / "x").write_bytes(b"\xff" * 20)
    with pytest.raises(CheckpointError, match="x is no safetensors file: its header would be"):
        read_header(tmp_path / "x")
    (tmp_path / "y").write_bytes((4).to_bytes(8, "little") + b"abcd")
    with pytest.raises(CheckpointError, match="y is no safetensors file: its header is no JSON"):
        read_header(tmp_path / "y")


def test_a_dtype_that_the_format_cannot_hold_is_named(tmp_path):
    lazy = LazyTensor("z", torch.complex64, (1,), lambda: torch.zeros(1))
    with pytest.raises(CheckpointError, match=r"z: a checkpoint cannot hold torch.complex64"):
        write_file(tmp_path / "f", [lazy], {}, 0)


def test_a_tensor_is_made_when_it_is_written_and_not_before(tmp_path):
    alive: list[weakref.ref] = []

    def make() -> torch.Tensor:
        assert all(ref() is None for ref in alive), "two tensors of a file are in memory at once"
        memory = np.full((3, 4), float(len(alive)), dtype=np.float32)
        alive.append(weakref.ref(memory))
        return torch.from_numpy(memory)

    pieces = {f"t{i}": LazyPiece((0, 0), (3, 4), make) for i in range(3)}
    held = [
        TensorRecord(key=key, global_shape=(3, 4), dtype=torch.float32, pieces=(piece,))
        for key, piece in pieces.items()
    ]
    found = read_all(publish_ranks(tmp_path, 1, [held]))
    assert len(alive) == 3
    assert {key: float(found[key].mean()) for key in found} == {"t0": 0, "t1": 1, "t2": 2}


@pytest.mark.parametrize("to_tp", [1, 2, 4])
@pytest.mark.parametrize("from_tp", [1, 2, 4])
def test_any_tensor_parallel_size_loads_any_other(tmp_path, small_blocks, from_tp, to_tp):
    whole = global_tensors(seed=3)
    folder = publish_model(tmp_path, 5, tp=from_tp, seed=3)
    for rank in range(to_tp):
        expected = shares(whole, to_tp, rank)
        found = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
        with CheckpointReader(folder) as reader:
            for record in records(found, to_tp, rank):
                reader.load(record)
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), (name, rank)


@pytest.mark.parametrize("seed", range(6))
def test_any_box_is_read_and_nothing_beside_it(tmp_path, small_blocks, seed):
    rng = random.Random(seed)
    tensor = torch.randn(7, 9, 5)
    held = [from_param("t", ParamInfo(global_shape=(7, 9, 5)), tensor)]
    with CheckpointReader(publish_ranks(tmp_path, 1, [held])) as reader:
        for _ in range(20):
            offset = tuple(rng.randrange(n) for n in tensor.shape)
            shape = tuple(rng.randint(1, n - o) for n, o in zip(tensor.shape, offset, strict=True))
            out = torch.full((shape[0], shape[1], 10), torch.nan)[..., 2 : 2 + shape[2]]
            reader.read_box("t", offset, out)
            box = tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))
            assert torch.equal(out, tensor[box])


def test_a_rank_reads_only_the_blocks_it_needs(tmp_path, small_blocks, monkeypatch):
    tensor = torch.arange(160, dtype=torch.float32).view(40, 4)
    held = [from_param("t", ParamInfo(global_shape=(40, 4)), tensor)]
    folder = publish_ranks(tmp_path, 1, [held])
    read = 0

    def count(file, buffers, offset, preadv=os.preadv):
        nonlocal read
        done = preadv(file, buffers, offset)
        read += done
        return done

    monkeypatch.setattr(os, "preadv", count)
    out = torch.zeros(10, 4)
    with CheckpointReader(folder) as reader:
        reader.read_box("t", (10, 0), out)
    assert torch.equal(out, tensor[10:20])
    assert read == 3 * 64  # bytes 160 to 320 touch blocks 2, 3 and 4


def test_a_dtype_changes_only_when_asked(tmp_path):
    folder = publish_model(tmp_path, 1)
    target = torch.zeros(12, 8, dtype=torch.bfloat16)
    wanted = from_param("layers.0.qkv.weight", ParamInfo(global_shape=(12, 8)), target)
    with CheckpointReader(folder) as reader:
        with pytest.raises(CheckpointError, match="qkv.weight has dtype float32 in the checkpoint"):
            reader.load(wanted)
        reader.load(wanted, cast=True)
    assert torch.equal(target, global_tensors()["layers.0.qkv.weight"].bfloat16())


def test_another_shape_and_another_name_are_errors_with_both_shapes(tmp_path):
    folder = publish_model(tmp_path, 1)
    with CheckpointReader(folder) as reader:
        wanted = from_param("temperature", ParamInfo(global_shape=(2,)), torch.zeros(2))
        with pytest.raises(CheckpointError, match=r"shape \[\] in the checkpoint and \[2\] in"):
            reader.load(wanted)
        with pytest.raises(CheckpointError, match="holds no tensor nowhere"):
            reader.read("nowhere")


def test_an_index_with_a_hole_or_an_overlap_is_refused():
    def entry(*boxes):
        pieces = [{"offset": [o], "shape": [n]} for o, n in boxes]
        return {"t": {"shape": [4], "dtype": "F32", "pieces": pieces}}

    merge_index([entry((0, 2)), entry((2, 2))])
    with pytest.raises(CheckpointError, match="t: 1 of its 4 elements have no writer"):
        merge_index([entry((0, 2)), entry((2, 1))])
    with pytest.raises(CheckpointError, match="t: two ranks wrote the same part of it"):
        merge_index([entry((0, 2)), entry((0, 2))])
    other = {"t": {"shape": [5], "dtype": "F32", "pieces": []}}
    with pytest.raises(CheckpointError, match=r"t: two ranks .* \[4\] F32 and \[5\]"):
        merge_index([entry((0, 4)), other])


# -- files that are not what was written ----------------------------------------------------


@pytest.fixture(scope="module")
def intact(tmp_path_factory):
    """A checkpoint of two ranks, one data file each."""
    return publish_model(tmp_path_factory.mktemp("intact"), 7, tp=2)


@pytest.fixture
def folder(intact, tmp_path):
    return Path(shutil.copytree(intact, tmp_path / "iter_0000007"))


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def assert_refused(folder: Path, *names: str) -> None:
    with pytest.raises(CheckpointDamaged) as caught:
        read_all(folder)
    assert any(name in str(caught.value) for name in names), str(caught.value)


NAMES = [
    "__0_0.safetensors",
    "__0_state.json",
    "__1_0.safetensors",
    "__1_state.json",
    "common.json",
    "index.json",
    "metadata.json",
]


def test_the_folder_has_these_files(intact):
    assert [path.name for path in files_of(intact)] == NAMES
    read_all(intact)


@pytest.mark.parametrize("name", NAMES)
def test_a_cut_empty_longer_or_missing_file_is_refused_and_named(folder, name):
    path = folder / name
    data = path.read_bytes()
    for changed in (data[:-1], data[: len(data) // 2], b"", data + b"x"):
        path.write_bytes(changed)
        assert_refused(folder, name)
    path.unlink()
    assert_refused(folder, name)


@pytest.mark.parametrize("name", NAMES)
def test_one_flipped_bit_is_refused_and_the_file_named(folder, name):
    path = folder / name
    data = path.read_bytes()
    rng = random.Random(name)
    for position in rng.sample(range(len(data)), min(20, len(data))):
        changed = bytearray(data)
        changed[position] ^= 1 << rng.randrange(8)
        path.write_bytes(changed)
        assert_refused(folder, name)


def test_swapped_files_are_refused(folder):
    first, second = folder / "__0_0.safetensors", folder / "__1_0.safetensors"
    spare = folder / "spare"
    first.rename(spare)
    second.rename(first)
    spare.rename(second)
    assert_refused(folder, "__0_0.safetensors", "__1_0.safetensors")


def test_a_data_file_of_another_checkpoint_is_refused(folder, tmp_path):
    other = publish_model(tmp_path / "other", 8, tp=2)
    shutil.copy(other / "__0_0.safetensors", folder)
    assert_refused(folder, "__0_0.safetensors")


def test_a_newer_format_version_is_named(folder, monkeypatch):
    module = "megatron.core.dist_checkpointing.manifest"
    manifest = read_manifest(folder)
    monkeypatch.setattr(f"{module}.VERSION", 2)
    write_manifest(folder, manifest)
    monkeypatch.setattr(f"{module}.VERSION", 1)
    with pytest.raises(CheckpointError, match="format version 2, this program reads up to 1"):
        read_manifest(folder)


def test_other_json_is_no_manifest(folder):
    (folder / MANIFEST).write_text("[]")
    assert_refused(folder, MANIFEST)
    (folder / MANIFEST).write_text(json.dumps({"sharded_backend": "torch_dist"}))
    assert read_manifest(folder) is None
