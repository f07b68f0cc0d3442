"""Damaged files of every format: one sentence that names the file, and no code from it is run."""

from __future__ import annotations

import contextlib
import json
import pickle
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megatron.core.config.errors import CheckpointDamaged, CheckpointError
from megatron.core.dist_checkpointing.all_ranks import save
from megatron.core.dist_checkpointing.formats import FORMATS, open_reader
from megatron.core.dist_checkpointing.manifest import (
    INDEX,
    MANIFEST_BESIDE,
    read_manifest,
    write_json,
    write_manifest,
)
from megatron.core.dist_checkpointing.megatron_formats.archive import MappedFile
from megatron.core.dist_checkpointing.megatron_formats.dcp_index import DcpIndex
from tests.support.ranks import run_ranks
from tests.support.reference_checkpoints import ITERATION, unpack
from tests.support.runs import TINY, train_gpt
from tests.unit.dist_checkpointing.test_faulty_files import SMALL
from tests.unit.dist_checkpointing.test_faulty_files import contents as contents
from tests.unit.dist_checkpointing.test_unpickler import Bomb

THEIRS = ("gpt_torch_dist", "gpt_torch_tp2pp2_distopt")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory, contents) -> dict[str, Path]:
    """One of each format as we write it, and two that the reference wrote."""
    root = tmp_path_factory.mktemp("whole")
    ours = {
        kind: save(root / kind, 1, contents, None, format=FORMATS[kind]).folder for kind in FORMATS
    }
    return ours | {name: unpack(root, name) / ITERATION for name in THEIRS}


def everything(folder: Path) -> dict[str, Any]:
    """All that a load may take from it."""
    with open_reader(folder) as reader:
        reader.check_sizes()
        values: dict[str, Any] = {"common": reader.common(), "state": reader.rank_state(0)}
        return values | {key: reader.read(key) for key in reader.tensors}


def is_same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(v, other[k]) if isinstance(v, torch.Tensor) else v == other[k]
        for k, v in one.items()
    )


def damaged(path: Path, whole: bytes, bomb: Bomb, rng: random.Random) -> Iterator[str]:
    """Damage the file, one way after the other, and put it right again."""
    for size in (0, 1, rng.randrange(len(whole)), len(whole) - 1):
        path.write_bytes(whole[:size])
        yield f"cut to {size}"
    for at in rng.sample(range(len(whole)), min(6, len(whole))):
        changed = bytearray(whole)
        changed[at] ^= 1 << rng.randrange(8)
        path.write_bytes(changed)
        yield f"bit {at} of {len(whole)} flipped"
    path.write_bytes(pickle.dumps(bomb))
    yield "a pickle"
    archive = BytesIO()
    torch.save({"model": bomb, "args": bomb}, archive)
    path.write_bytes(archive.getvalue())
    yield "an archive of torch"
    path.unlink()
    if path.name != MANIFEST_BESIDE:  # what others wrote has none
        yield "missing"
    path.write_bytes(whole)


@pytest.mark.feature("Checkpoints: any damage is one sentence with the file, and runs no code")
@pytest.mark.parametrize("kind", [*FORMATS, *THEIRS])
def test_damage_of_any_file_is_a_sentence_that_names_it(checkpoints, tmp_path, kind):
    folder = Path(shutil.copytree(checkpoints[kind], tmp_path / "iter_0000001"))
    expected, wrong = everything(folder), []
    bomb = tmp_path / "made"
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        whole = path.read_bytes()
        for how in damaged(path, whole, Bomb(bomb), random.Random(path.name)):
            what = f"{path.relative_to(folder)} {how}"
            try:
                if not is_same(everything(folder), expected):
                    wrong.append(f"{what}: another content is read")
                elif "flipped" not in how:
                    wrong.append(f"{what}: it is read")
            except CheckpointError as error:
                if path.name not in str(error):
                    wrong.append(f"{what}: {error}")
            except Exception as error:
                wrong.append(f"{what}: {type(error).__name__}: {error}")
    print("\n".join(wrong))
    assert not bomb.exists()
    assert wrong == []


def reindexed(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the index of our format, and every checksum that covers it."""
    index = json.loads((folder / INDEX).read_bytes())
    change(index["tensors"])
    manifest = read_manifest(folder)
    entry = write_json(folder / INDEX, index)
    write_manifest(folder, replace(manifest, files={**manifest.files, INDEX: entry}))


@pytest.mark.parametrize("dtype", ["I32", "BF16", "F64", "Q9"])
def test_a_wrong_dtype_in_our_index_is_found_though_all_checksums_fit(checkpoints, tmp_path, dtype):
    folder = Path(shutil.copytree(checkpoints["safetensors_dist"], tmp_path / "iter_0000001"))
    key = "optimizer.state.exp_avg.decoder.final_layernorm.weight"
    reindexed(folder, lambda tensors: tensors[key].update(dtype=dtype))
    with pytest.raises(CheckpointDamaged, match=r"index\.json|safetensors"):
        everything(folder)


def test_an_index_of_other_json_is_damaged_though_its_checksum_fits(checkpoints, tmp_path):
    folder = Path(shutil.copytree(checkpoints["safetensors_dist"], tmp_path / "iter_0000001"))
    key = "decoder.final_layernorm.weight"
    for change in (
        lambda tensors: tensors.update({key: None}),
        lambda tensors: tensors[key].pop("pieces"),
        lambda tensors: tensors[key]["pieces"][0].update(file="../x"),
        lambda tensors: tensors[key]["pieces"][0].update(crc32=[]),
        lambda tensors: tensors[key]["pieces"][0].update(start=-8),
    ):
        shutil.copy(checkpoints["safetensors_dist"] / INDEX, folder / INDEX)
        reindexed(folder, change)
        with pytest.raises(CheckpointDamaged, match=r"index\.json|safetensors|x is not in"):
            everything(folder)


@pytest.mark.parametrize("kind", ["torch_dist", "torch_dcp", "fsdp_dtensor"])
def test_torch_reads_what_is_written_in_its_format(checkpoints, kind):
    """The values are those that our reader finds, and the index names no path of this machine."""
    metadata = dcp.FileSystemReader(checkpoints[kind]).read_metadata()
    assert metadata.storage_meta.checkpoint_id is None
    index = DcpIndex(checkpoints[kind], MappedFile)
    assert index.tensors
    found = {key: torch.zeros(t.shape, dtype=t.dtype) for key, t in index.tensors.items()}
    dcp.load(found, checkpoint_id=checkpoints[kind], no_dist=True)
    for key, tensor in index.tensors.items():
        for chunk in tensor.chunks:
            box = tuple(slice(o, o + n) for o, n in zip(chunk.offset, chunk.shape, strict=True))
            assert torch.equal(found[key][box], chunk.array().read())


@pytest.mark.parametrize("kind", ["torch_dist", "torch_dcp"])
def test_a_wrong_dtype_in_the_index_of_torch_is_found(checkpoints, tmp_path, kind):
    folder = Path(shutil.copytree(checkpoints[kind], tmp_path / "iter_0000001"))
    (folder / MANIFEST_BESIDE).unlink()
    index = folder / ".metadata"
    metadata = pickle.loads(index.read_bytes())
    tensors = [t for t in metadata.state_dict_metadata.values() if hasattr(t, "properties")]
    halves = [t.properties for t in tensors if t.properties.dtype == torch.bfloat16]
    assert halves
    for properties in halves:
        properties.dtype = torch.float16
    index.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointDamaged, match="bfloat16"):
        everything(folder)


@pytest.mark.parametrize("kind", ["safetensors_dist", "torch_dist", "torch"])
def test_a_run_ends_with_one_sentence(checkpoints, tmp_path, kind):
    """Not zero, no traceback, and the bomb has not gone off."""
    folder = Path(shutil.copytree(checkpoints[kind], tmp_path / "iter_0000001"))
    bomb = tmp_path / "made"
    data = max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    whole = data.read_bytes()
    flipped = bytearray(whole)
    for at in range(len(whole) // 2, len(whole) // 2 + 4000, 100):  # some of it is padding
        flipped[at] ^= 1
    archive = BytesIO()
    torch.save({"model": Bomb(bomb)}, archive)
    for content in (whole[:-1000], flipped, archive.getvalue()):
        data.write_bytes(content)
        ((status, said),) = run_ranks(ended, 1, [*TINY, *SMALL, "--load", str(tmp_path)])
        assert status in (2, 65), "neither is restarted"
        assert data.name in said
        assert len(said.strip().splitlines()) == 1, said
    assert not bomb.exists()


def ended(rank: int, world_size: int, argv: list[str]) -> tuple[Any, str]:
    """Exit status of a run, and what it said on stderr."""
    with contextlib.redirect_stderr(StringIO()) as heard, pytest.raises(SystemExit) as caught:
        train_gpt(rank, world_size, argv)
    return caught.value.code, heard.getvalue()
