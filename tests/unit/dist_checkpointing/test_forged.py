"""Checkpoints of our format whose checksums fit and whose values do not: one message each."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.config.errors import CheckpointDamaged, CheckpointError
from megatron.core.dist_checkpointing.all_ranks import save
from megatron.core.dist_checkpointing.formats import Contents, open_reader
from megatron.core.dist_checkpointing.manifest import (
    COMMON,
    INDEX,
    MANIFEST,
    FileEntry,
    _checksum,
    adopt_file,
    read_manifest,
    write_manifest,
)
from megatron.core.dist_checkpointing.records import ParamInfo, from_param
from megatron.core.text_files import parse_yaml
from megatron.training.checkpointing.checkpoint_tensors import rng_state
from megatron.training.checkpointing.paths import check_common, check_rank_state
from tests.support.tiny_checkpoint import publish_model, read_all

QKV, PROJ = "layers.0.qkv.weight", "layers.0.proj.weight"
STATE = "__0_state.json"


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """Two ranks' halves."""
    return publish_model(tmp_path_factory.mktemp("whole"), 1, tp=2)


def sign(folder: Path, name: str) -> None:
    """Let size and checksum of a file in the manifest be what they are."""
    manifest = read_manifest(folder)
    entry = adopt_file(folder / name)
    if name.endswith(".safetensors"):
        length = 8 + int.from_bytes((folder / name).read_bytes()[:8], "little")
        entry = FileEntry(entry.num_bytes, length, crc_of(folder / name, length))
    write_manifest(folder, replace(manifest, files={**manifest.files, name: entry}))


def crc_of(path: Path, length: int) -> int:
    part = path.with_name("part")
    part.write_bytes(path.read_bytes()[:length])
    crc = adopt_file(part).crc32
    part.unlink()
    return crc


def pieces(index: dict[str, Any], key: str = QKV) -> list[dict[str, Any]]:
    return index["tensors"][key]["pieces"]


def set_to(value: Any, *path: Any) -> Callable[[Any], object]:
    def change(tree: Any) -> None:
        for step in path[:-1]:
            tree = tree[step]
        tree[path[-1]] = value

    return change


def overlapping(index: dict[str, Any]) -> None:
    """The volume is right, and half of the tensor is not there."""
    pieces(index)[1]["offset"] = [3, 0]
    pieces(index)[0]["offset"] = [3, 0]


def swapped(index: dict[str, Any]) -> None:
    """Each half of a tensor under the other's place."""
    first, second = pieces(index)
    first["offset"], second["offset"] = second["offset"], first["offset"]


def twice(index: dict[str, Any]) -> None:
    """The same bytes for both halves."""
    pieces(index)[1].update({**pieces(index)[0], "offset": pieces(index)[1]["offset"]})


AT = ("tensors", QKV, "pieces", 0)
CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "overlapping": overlapping,
    "swapped": swapped,
    "the same bytes twice": twice,
    "a hole": lambda index: pieces(index).pop(),
    "no pieces": set_to([], *AT[:-1]),
    "a file that is not there": set_to("__7_0.safetensors", *AT, "file"),
    "another file of the checkpoint": set_to(COMMON, *AT, "file"),
    "a file above": set_to("../x", *AT, "file"),
    "a number for a file": set_to(7, *AT, "file"),
    "no block size": set_to(0, "block_bytes"),
    "no tensors": set_to([], "tensors"),
    "more dimensions": set_to([6, 8, 1], *AT, "shape"),
    "a piece beside its tensor": set_to([11, 0], *AT, "offset"),
    "another dtype": set_to("I32", "tensors", QKV, "dtype"),
    "a dtype that is no text": set_to(["F32"], "tensors", QKV, "dtype"),
    "text for checksums": set_to("1", *AT, "crc32"),
    "wrong checksums": set_to([1], *AT, "crc32"),
}
for number in (-1, -8, 2**62, 2**63, 10**400, 1.0, float("nan"), "1", True, None, [1]):
    for field in ("start", "num_bytes"):
        CHANGES[f"{field} {number!r:.20}"] = set_to(number, *AT, field)
    for field in ("offset", "shape"):
        CHANGES[f"{field} {number!r:.20}"] = set_to([number, 0], *AT, field)
    CHANGES[f"whole shape {number!r:.20}"] = set_to([number, 8], "tensors", QKV, "shape")


@pytest.mark.feature("Checkpoints: a forged index is refused by one message, whatever its checksum")
@pytest.mark.parametrize("case", CHANGES)
def test_a_forged_index_is_refused(whole, tmp_path, case):
    folder = Path(shutil.copytree(whole, tmp_path / "iter_0000001"))
    index = json.loads((folder / INDEX).read_bytes())
    CHANGES[case](index)
    (folder / INDEX).write_text(json.dumps(index))
    sign(folder, INDEX)
    with pytest.raises(CheckpointDamaged, match=str(folder)):
        read_all(folder)


@pytest.mark.parametrize("name", [INDEX, COMMON, STATE, MANIFEST])
@pytest.mark.parametrize(
    "content", ["", "7", "[]", "null", '"x"', "\xff", "[" * 10**5, '{"a":1,"a":1}', "1" * 5000]
)
def test_a_json_file_of_something_else_is_refused(whole, tmp_path, name, content):
    folder = Path(shutil.copytree(whole, tmp_path / "iter_0000001"))
    (folder / name).write_bytes(content.encode("latin-1"))
    if name != MANIFEST:
        sign(folder, name)
    with pytest.raises(CheckpointDamaged, match=str(folder / name)):
        read_everything(folder)


def read_everything(folder: Path) -> None:
    read_all(folder)
    with open_reader(folder) as reader:
        reader.rank_state(0)


@pytest.mark.parametrize("name", [INDEX, COMMON, STATE, MANIFEST, "__0_0.safetensors"])
@pytest.mark.parametrize("kind", ["directory", "loop"])
def test_what_is_no_file_is_refused(whole, tmp_path, name, kind):
    folder = Path(shutil.copytree(whole, tmp_path / "iter_0000001"))
    (folder / name).unlink()
    if kind == "directory":
        (folder / name).mkdir()
    else:
        (folder / name).symlink_to(name)
    with pytest.raises(CheckpointDamaged, match=str(folder / name)):
        read_all(folder)


@pytest.mark.parametrize(
    "change",
    [
        {"layout": {"dense": 7}},
        {"layout": {"dense": [["tp", "2"]]}},
        {"layout": {"dense": [["tp", 2, 3]]}},
        {"layout": {"world_size": -1}},
        {"files": {"../x": {"num_bytes": 1, "checked_bytes": 1, "crc32": 1}}},
        {"files": {INDEX: {"num_bytes": 1, "checked_bytes": 2, "crc32": 1}}},
        {"files": []},
        {"tracker_before": [1, "x"]},
        {"attempt": 7},
        {"iteration": 2**63},
        {"version": "1"},
    ],
)
def test_a_signed_manifest_of_other_types_is_refused(whole, tmp_path, change):
    folder = Path(shutil.copytree(whole, tmp_path / "iter_0000001"))
    body = json.loads((folder / MANIFEST).read_bytes()) | change
    body.pop("crc32")
    (folder / MANIFEST).write_text(json.dumps(body | {"crc32": _checksum(body)}))
    with pytest.raises(CheckpointDamaged, match=str(folder / MANIFEST)):
        read_all(folder)


def common_of_a_run() -> dict[str, Any]:
    return {
        "iteration": 5,
        "args": {},
        "checkpoint_version": 3.0,
        "counters": {"iteration": 5},
        "optimizer": {"step": 5, "grad_scaler": {"scale": 1.0}},
        "opt_param_scheduler": {"num_steps": 8},
    }


@pytest.mark.parametrize(
    "path",
    ["iteration", "args", "checkpoint_version", "counters", "counters.iteration", "optimizer",
     "optimizer.step", "optimizer.grad_scaler", "optimizer.grad_scaler.scale",
     "opt_param_scheduler", "opt_param_scheduler.num_steps"],
)  # fmt: skip
@pytest.mark.parametrize("value", ["x", [1], float("nan"), float("inf"), 10**400, -1])
def test_common_values_of_no_run_are_refused(path, value):
    check_common(common_of_a_run(), Path("iter_7"))
    forged = common_of_a_run()
    set_to(value, *path.split("."))(forged)
    is_plain = path == "opt_param_scheduler.num_steps" and not isinstance(value, list)
    if is_plain:  # compared by the scheduler itself
        check_common(forged, Path("iter_7"))
        return
    with pytest.raises(CheckpointDamaged, match="iter_7 is damaged: its "):
        check_common(forged, Path("iter_7"))


@pytest.mark.parametrize(
    "change",
    [
        set_to("!", "torch_rng_state"),
        set_to("", "torch_rng_state"),
        set_to([3, [1], None], "random_rng_state"),
        set_to(None, "np_rng_state"),
        set_to(10**6, "np_rng_state", 2),
        set_to(-1, "np_rng_state", 2),
        set_to([1] * 624, "np_rng_state", 0),
        lambda state: state.pop("cuda_rng_state"),
    ],
)
def test_random_states_of_no_generator_are_refused(change):
    states = json.loads(json.dumps(rng_state()))
    assert check_rank_state({"rng_state": states}, Path("iter_7"))["rng_state"] == states
    change(states)
    with pytest.raises(CheckpointDamaged, match="iter_7 is damaged"):
        check_rank_state({"rng_state": states}, Path("iter_7"))


def test_an_empty_tensor_of_any_size_is_refused_and_one_of_ours_is_read(tmp_path):
    empty = from_param("empty", ParamInfo(global_shape=(0, 4)), torch.zeros(0, 4))
    made = Contents(tensors=[empty], common={"iteration": 1, "args": {}})
    folder = save(tmp_path, 1, made, None).folder
    assert read_all(folder)["empty"].shape == (0, 4)
    index = json.loads((folder / INDEX).read_bytes())
    index["tensors"]["empty"] |= {"shape": [2**60, 0, 2**60], "pieces": []}
    (folder / INDEX).write_text(json.dumps(index))
    sign(folder, INDEX)
    with pytest.raises(CheckpointDamaged, match="its shape is"):
        read_all(folder)


@pytest.mark.parametrize(
    "text",
    ["[" * 10**5, "a: &x [*x]", "a: 2001-99-99", "a: !!int x", "a: " + "1" * 5000, "? [1, 2]: 3",
     "a: &a [1, 1, 1]\n" + "".join(f"b{i}: &{chr(98 + i)} [{', '.join(['*' + chr(97 + i)] * 9)}]\n"
                                  for i in range(9))],
)  # fmt: skip
def test_yaml_that_is_no_file_of_flags_is_one_error(text):
    pytest.importorskip("yaml")
    with pytest.raises(CheckpointError, match="x.yaml: "):
        parse_yaml(text, "x.yaml", CheckpointError)
