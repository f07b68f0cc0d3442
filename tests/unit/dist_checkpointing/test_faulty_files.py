"""A disk that fails at any operation of a save: nothing is lost, and training may go on."""

from __future__ import annotations

import errno
import os
from itertools import cycle
from pathlib import Path

import pytest
import torch

from megatron.core.dist_checkpointing import commit
from megatron.core.dist_checkpointing.all_ranks import SaveFailed, begin, save
from megatron.core.dist_checkpointing.background import BackgroundSave, HostBuffer
from megatron.core.dist_checkpointing.folders import TRACKER, choose
from megatron.core.dist_checkpointing.formats import FORMATS, Contents, open_reader
from megatron.core.dist_checkpointing.reader import CheckpointReader
from megatron.core.dist_checkpointing.records import from_param
from megatron.core.params.param_info import ParamInfo
from tests.support import selection
from tests.support.faulty_files import FaultyFiles
from tests.support.runs import run_gpt
from tests.support.tiny_checkpoint import names_in

# Few tensors: a save costs time for each.
SMALL = "--bf16 --num-layers 1 --disable-bias-linear --normalization RMSNorm".split()


@pytest.fixture(scope="module")
def contents(tmp_path_factory):
    """A trained GPT of one layer with its optimizer."""
    root = tmp_path_factory.mktemp("trained")
    run_gpt(root, *SMALL, "--train-iters", "1", "--eval-iters", "0", "--save", str(root))
    with CheckpointReader(root / "iter_0000001") as reader:
        values = {key: reader.read(key) for key in reader.tensors}
        common = reader.common()
        common["args"]["world_size"] = 1  # as in a command line for the reference
        return Contents(
            tensors=[
                from_param(k, ParamInfo(global_shape=tuple(t.shape)), t) for k, t in values.items()
            ],
            rank_state=reader.rank_state(0),
            common=common,
            layout=reader.manifest.layout,
            write_config=lambda path: path.write_text("{}"),
        )


def at_once(root, iteration, contents, kind):
    save(root, iteration, contents, None, format=FORMATS[kind])


def in_background(root, iteration, contents, kind):
    begun = begin(root, iteration, contents, None, format=FORMATS[kind])
    BackgroundSave(begun, HostBuffer(), None).wait()


def newest(root: Path) -> int:
    """The iteration that would be loaded, of which every byte is verified."""
    found = choose(root).found
    with open_reader(found.folder) as reader:
        reader.check_files()
        for key in reader.tensors:
            reader.read(key)
    return found.iteration


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def to_try(done: list[str]) -> list[int]:
    """Every operation; of more than 40 writes 10."""
    writes = [i for i, kind in enumerate(done) if kind == "write"]
    chosen = writes[:: max(1, len(writes) // 10)] if len(writes) > 40 else writes
    return sorted({i for i, kind in enumerate(done) if kind != "write"} | set(chosen))


CODES = [errno.ENOSPC, errno.EIO]
WAYS = [(kind, at_once) for kind in FORMATS] + [("safetensors_dist", in_background)]


@pytest.mark.feature("Checkpoints: a disk that fails at any operation of a save loses nothing")
@pytest.mark.parametrize(
    ("kind", "how", "code"),
    selection.only(
        [(*way, code) for way, code in zip(WAYS, cycle(CODES), strict=False)],
        [(*way, code) for way in WAYS for code in CODES],
    ),
)
def test_a_disk_that_fails_at_any_operation_of_a_save_loses_nothing(
    tmp_path, contents, kind, how, code
):
    """A disk that stays full, or one error."""
    with FaultyFiles().installed() as disk:
        how(tmp_path, 1, contents, kind)
    assert {"open", "write", "fsync", "mkdir", "rename"} <= set(disk.done)
    last, before = 1, files(tmp_path / "iter_0000001")
    for fails_at in to_try(disk.done):
        if code == errno.EIO and disk.done[fails_at] == "mkdir":
            continue  # once, for a folder that is there, it is no failure
        commit._claimed.clear()  # every save is the first one of a run
        faulty = FaultyFiles(fails_at, code, once=code == errno.EIO)
        with faulty.installed(), pytest.raises(SaveFailed) as caught:
            how(tmp_path, last + 1, contents, kind)
        assert len(faulty.done) > fails_at
        said = f"the checkpoint of iteration {last + 1} was not saved in {tmp_path}: "
        assert str(caught.value).startswith(said)
        assert os.strerror(code) in str(caught.value)
        if "is complete, but" in str(caught.value):
            last += 1
            assert newest(tmp_path) == last
        assert choose(tmp_path).found.iteration == last
        assert files(tmp_path / "iter_0000001") == before
    how(tmp_path, last + 1, contents, kind)
    assert newest(tmp_path) == last + 1
    published = {f"iter_{i:07d}" for i in range(1, last + 2)}
    assert set(names_in(tmp_path)) == {TRACKER} | published


@pytest.mark.parametrize("kind", FORMATS)
def test_a_disk_that_takes_only_a_part_of_each_write_gets_the_rest(tmp_path, contents, kind):
    with FaultyFiles(short=True).installed() as disk:
        at_once(tmp_path, 1, contents, kind)
    assert disk.done.count("write") > 20
    assert newest(tmp_path) == 1
    with open_reader(tmp_path / "iter_0000001") as reader:
        for tensor in contents.tensors:
            assert torch.equal(reader.read(tensor.key), tensor.pieces[0].data), tensor.key
