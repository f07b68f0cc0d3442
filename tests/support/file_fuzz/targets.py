"""The parsers of files: a sample for each, what reads it, and how it is damaged.

``strict`` of a change says what a parser may still read from the file: everything as before
("all"), every tensor as before ("tensors"; other values may be those that the file says now), or
whatever the file says now ("none"), for files without checksums.
"""

from __future__ import annotations

import json
import random
import shutil
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron.core.dist_checkpointing.all_ranks import load, save
from megatron.core.dist_checkpointing.folders import TRACKER, choose
from megatron.core.dist_checkpointing.formats import FORMATS, Contents, open_reader
from megatron.core.dist_checkpointing.local import find_local, load_local, part_root
from megatron.core.dist_checkpointing.manifest import (
    INDEX,
    MANIFEST,
    MANIFEST_BESIDE,
    SAVE,
    FileEntry,
    _checksum,
    read_manifest,
    write_manifest,
)
from megatron.core.dist_checkpointing.records import ParamInfo, TensorRecord, from_param
from megatron.training.checkpointing.checkpoint_tensors import rng_state
from megatron.training.checkpointing.paths import check_common, check_rank_state
from tests.support.file_fuzz.mutations import (
    change_archive,
    change_bytes,
    change_json,
    change_pickle,
    replace_file,
)
from tests.support.reference_checkpoints import ITERATION, unpack
from tests.support.tiny_checkpoint import global_tensors
from tests.support.tiny_run import Alone

Content = dict[str, Any]


@dataclass(frozen=True)
class Change:
    """What was done to a sample, and what has to be read from it unless it is refused."""

    what: str
    strict: str = "all"


@dataclass(frozen=True)
class Target:
    """A parser.  ``read`` returns tensors and other values by name, or raises MegatronError."""

    name: str
    make: Callable[[Path], object]
    read: Callable[[Path], Content]
    change: Callable[[Path, random.Random], Change]


# -- checkpoints ----------------------------------------------------------------------------


def _contents(layout: Mapping[str, Any]) -> Contents:
    """A small model in several pieces with what a run has beside it."""
    halves = {}
    for name, whole in global_tensors().items():
        halves[name] = from_param(name, ParamInfo(global_shape=tuple(whole.shape)), whole)
    common = {
        "checkpoint_version": 3.0,
        "iteration": 1,
        "args": {"num_layers": 1, "lr": 0.1},
        "counters": {"iteration": 1, "num_tokens": 7},
        "optimizer": {"step": 1, "grad_scaler": {"scale": 2.0}},
        "opt_param_scheduler": {"num_steps": 8, "lr_decay_style": "cosine"},
    }
    random.seed(0)
    state = {"rng_state": rng_state()}
    return Contents(tensors=list(halves.values()), common=common, rank_state=state, layout=layout)


def _make_ours(root: Path) -> None:
    save(root, 1, _contents({"world_size": 1, "dense": [["tp", 1]]}), None)


def _make_theirs(root: Path, name: str) -> None:
    shutil.copytree(unpack(root / "packed", name) / ITERATION, root / "iter_0000001")
    shutil.rmtree(root / "packed")


def _make_converted(root: Path, kind: str) -> None:
    """A checkpoint of Megatron-LM, written by us in another of its formats."""
    source = unpack(root / "packed", "gpt_torch") / ITERATION
    with open_reader(source) as reader:
        values = {key: reader.read(key) for key in reader.tensors}
        common = reader.common()
        common["args"]["world_size"] = 1
        made = Contents(
            tensors=[_record(key, value) for key, value in values.items()],
            common=common,
            rank_state=reader.rank_state(0),
            layout=reader.manifest.layout,
        )
    save(root, 1, made, None, format=FORMATS[kind])
    shutil.rmtree(root / "packed")


def _record(key: str, values: torch.Tensor) -> TensorRecord:
    info = ParamInfo(global_shape=tuple(values.shape))
    return from_param(key, info, values, dtype=values.dtype)


def read_checkpoint(folder: Path) -> Content:
    """All that a load takes, and all that the inspector does."""
    with open_reader(folder) as reader:
        reader.check_sizes()
        common, state = reader.common(), reader.rank_state(0)
        check_common(common, folder)
        if state is not None:
            check_rank_state(state, folder)
        tensors = {key: reader.read(key) for key in reader.tensors}
    return {"tensors": tensors, "common": common, "state": state}


def _load_as_before(folder: Path, before: Content) -> Content:
    """`read_checkpoint`, and what a run with the tensors of ``before`` loads."""
    found = read_checkpoint(folder)
    wanted = [_record(key, torch.zeros_like(value)) for key, value in before["tensors"].items()]
    load(folder, wanted, None)
    return found | {"tensors": {tensor.key: tensor.pieces[0].data for tensor in wanted}}


def _in(root: Path) -> Path:
    return root / "iter_0000001"


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _change_any(folder: Path, rng: random.Random) -> str:
    path = rng.choice(_files(folder))
    if rng.random() < 0.2:
        return f"{path.name}: {replace_file(path, rng)} in its place"
    path.write_bytes(change_bytes(path.read_bytes(), rng))
    return f"{path.name}: bytes"


def change_ours(root: Path, rng: random.Random) -> Change:
    """Bytes of any file; or JSON of one, with all checksums right."""
    folder = _in(root)
    if rng.random() < 0.4:
        return Change(_change_any(folder, rng))
    names = [p.name for p in _files(folder) if p.suffix in (".json", ".safetensors")]
    name = rng.choice([INDEX, MANIFEST, *names])
    path = folder / name
    manifest = read_manifest(folder)
    assert manifest is not None
    if name == MANIFEST:
        body = json.loads(path.read_bytes())
        body.pop("crc32")
        _sign_manifest(path, change_json(json.dumps(body).encode(), rng))
        return Change("the manifest, signed", "tensors")
    data = path.read_bytes()
    if path.suffix == ".json":
        data = change_json(data, rng)
        entry = FileEntry(len(data), len(data), zlib.crc32(data))
    else:
        length = int.from_bytes(data[:8], "little")
        header = change_json(data[8 : 8 + length], rng)
        data = len(header).to_bytes(8, "little") + header + data[8 + length :]
        entry = FileEntry(len(data), len(header) + 8, zlib.crc32(data[: len(header) + 8]))
    path.write_bytes(data)
    write_manifest(folder, replace(manifest, files={**manifest.files, name: entry}))
    return Change(f"{name}, signed", "all" if name == INDEX else "tensors")


def _sign_manifest(path: Path, data: bytes) -> None:
    try:
        body = json.loads(data)
        signed = json.dumps(body | {"crc32": _checksum(body)}).encode()
    except (TypeError, ValueError, RecursionError):
        signed = data
    path.write_bytes(signed)


def change_theirs(root: Path, rng: random.Random) -> Change:
    """Bytes of any file, or values in a pickle with right checksums, without our manifest."""
    folder = _in(root)
    if rng.random() < 0.5:
        (folder / MANIFEST_BESIDE).unlink(missing_ok=True)
    has_manifest = (folder / MANIFEST_BESIDE).exists()
    if rng.random() < 0.4:
        return Change(_change_any(folder, rng), "all" if has_manifest else "tensors")
    names = (".pt", ".metadata")
    path = rng.choice([p for p in _files(folder) if p.name.endswith(names)])
    change = change_pickle if path.name == ".metadata" else change_archive
    path.write_bytes(change(path.read_bytes(), rng))
    return Change(f"{path.name}: its pickle", "none")


def _make_local(root: Path) -> None:
    made = _contents({"world_size": 1, SAVE: [1, "a"]})
    save(part_root(root, 0), 1, made, None)


def _read_local(root: Path) -> Content:
    layout = {"world_size": 1}
    found, notes = find_local(root, layout, 0, Alone())  # type: ignore[arg-type]
    if found is None:
        return {"notes": True}
    wanted = [_record(key, torch.zeros_like(value)) for key, value in global_tensors().items()]
    load_local(found, wanted, Alone())  # type: ignore[arg-type]
    check_common(found.common, root)
    return {"tensors": {t.key: t.pieces[0].data for t in wanted}, "common": found.common}


def _change_local(root: Path, rng: random.Random) -> Change:
    return replace(change_ours(part_root(root, 0), rng), strict="tensors")


# -- a directory of checkpoints -------------------------------------------------------------


def _make_directory(root: Path) -> None:
    for iteration in (1, 2, 3):
        save(root, iteration, Contents(tensors=[], common={}), None)


def _read_directory(root: Path) -> Content:
    """What is chosen; the next save has to succeed whatever older checkpoints are."""
    lenient = choose(root, lenient=True)
    assert lenient is not None
    found = choose(root)
    assert found is not None
    save(root, 4, Contents(tensors=[], common={}), None)
    after = choose(root)
    assert after is not None
    return {"newest": found.found.iteration, "after": after.found.iteration}


def _change_directory(root: Path, rng: random.Random) -> Change:
    if rng.random() < 0.3:
        path = root / TRACKER
        digits = str(rng.choice((0, 1, 3, 10**17, 10**18, 10**400))) + rng.choice(
            ("", "\n", "0" * 5000)
        )
        path.write_text(rng.choice((digits, "release", "x", "\u0663")))
        return Change("the tracker", "none")
    path = root / f"iter_000000{rng.choice((1, 2))}" / MANIFEST
    if rng.random() < 0.4:
        what = replace_file(path, rng)
    elif rng.random() < 0.5:
        what = "bytes"
        path.write_bytes(change_bytes(path.read_bytes(), rng))
    else:
        what = "signed"
        body = json.loads(path.read_bytes())
        body.pop("crc32")
        changed = change_json(json.dumps(body).encode(), rng)
        _sign_manifest(path, changed)
        # It may say that it was published last; then it is what one asked for.
        return Change(f"{path.parent.name}: {what}", "none")
    return Change(f"{path.parent.name}: {what}")


CHECKPOINTS = [
    Target("checkpoint", _make_ours, lambda root: read_checkpoint(_in(root)), change_ours),
    Target("local", _make_local, _read_local, _change_local),
    Target("directory", _make_directory, _read_directory, _change_directory),
    *(
        Target(
            f"converted {kind}",
            partial(_make_converted, kind=kind),
            lambda root: read_checkpoint(_in(root)),
            change_theirs,
        )
        for kind in ("torch_dist", "torch", "torch_dcp", "fsdp_dtensor")
    ),
    *(
        Target(
            name,
            partial(_make_theirs, name=name),
            lambda root: read_checkpoint(_in(root)),
            change_theirs,
        )
        for name in ("gpt_torch_dist", "gpt_torch", "gpt_torch_tp2pp2_distopt")
    ),
]


def again(target: Target, root: Path, before: Content) -> Content:
    """What is read from a changed sample."""
    if target.change in (change_ours, change_theirs):
        return _load_as_before(_in(root), before)
    return target.read(root)
