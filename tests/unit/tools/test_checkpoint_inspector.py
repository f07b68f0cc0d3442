"""checkpoint_inspector.py: what it shows of a checkpoint, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megatron.core import dist_checkpointing
from megatron.core.config.errors import CheckpointDamaged, CheckpointError, ConfigError
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.training.checkpointing.paths import open_checkpoint
from tests.support.tiny_checkpoint import global_tensors, publish_model
from tools.checkpoint.checkpoint_inspector import main


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return publish_model(tmp_path / "a", 5, tp=2, seed=3)


def shown(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    main([str(word) for word in argv])
    return capsys.readouterr().out


@pytest.mark.feature("Tools: checkpoint_inspector.py lists, prints, compares and verifies")
def test_every_tensor_is_listed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "inspect", folder)
    described = json.loads(shown(capsys, "print-torch-dcp-in-json", folder))
    whole = global_tensors(seed=3)
    assert described.keys() == whole.keys()
    for name, tensor in whole.items():
        kind = str(tensor.dtype).removeprefix("torch.")
        assert f"{name}  {list(tensor.shape)}  {kind}" in text
        assert described[name] == {"shape": list(tensor.shape), "dtype": kind}
    assert f"{len(whole)} tensors" in text


def test_a_tensor_is_printed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, tensor = next(iter(global_tensors(seed=3).items()))
    text = shown(capsys, "print-tensor", folder, name)
    assert f"max {float(tensor.double().max()):.6g}" in text
    with pytest.raises(CheckpointError, match="holds no tensor nothing"):
        main(["print-tensor", str(folder), "nothing"])


def test_differences_are_counted(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    same = publish_model(tmp_path / "b", 5, tp=1, seed=3)
    assert "0 of" in shown(capsys, "diff", folder, same)
    other = publish_model(tmp_path / "c", 5, tp=1, seed=4)
    with pytest.raises(SystemExit) as ended:
        main(["diff", str(folder), str(other)])
    assert ended.value.code == 1
    text = capsys.readouterr().out
    name = next(iter(global_tensors()))
    a, b = (global_tensors(seed=seed)[name].double() for seed in (3, 4))
    assert f"{name}  max abs {float((a - b).abs().max()):.3g}, max rel" in text


def test_an_altered_file_does_not_verify(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "is whole" in shown(capsys, "verify", folder)
    path = folder / "__0_0.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="__0_0.safetensors is damaged"):
        main(["verify", str(folder)])


def test_a_library_checkpoint_is_shown_as_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    library = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(2, 3)), "epoch": 4}
    dist_checkpointing.save(library, tmp_path)
    text = shown(capsys, "inspect", tmp_path)
    assert "library checkpoint" in text.splitlines()[0]
    assert "w  [2, 3]  float32" in text
    assert "max 1 " in shown(capsys, "print-tensor", tmp_path, "w")
    assert "is whole" in shown(capsys, "verify", tmp_path)
    with pytest.raises(CheckpointError, match="is a library checkpoint") as refused:
        open_checkpoint(tmp_path)
    assert not isinstance(refused.value, CheckpointDamaged)


def test_names_are_changed_in_a_copy(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, *_ = whole = list(global_tensors())
    shown(
        capsys,
        *("modify-state-dict", folder, tmp_path / "new"),
        *("--op", f"rename ^{first}$ other", "--op", f"delete ^{second}$"),
    )
    described = json.loads(shown(capsys, "print-torch-dcp-in-json", tmp_path / "new"))
    assert described.keys() == {"other", *whole} - {first, second}
    for op, sentence in (("move a b", "give 'rename PATTERN"), ("delete ^nothing$", "changes no")):
        with pytest.raises(ConfigError, match=sentence):
            main(["modify-state-dict", str(folder), str(tmp_path / "x"), "--op", op])


def test_a_multi_storage_client_is_not_needed_for_local_files(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["inspect", str(folder), "--enable-msc"])
    assert "--enable-msc is without effect" in capsys.readouterr().out


def test_what_is_not_served_is_said(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = ["convert-torch-dist-to-fsdp-dtensor", str(folder), str(tmp_path / "x")]
    with pytest.raises(
        ConfigError, match="prefix mine: the written keys always begin with model.module"
    ):
        main([*there, "--output-model-weight-prefix", "mine"])
    without_effect = ("--oom-traceback", "--distributed-timeout-minutes", "5")
    with pytest.raises(ConfigError, match="--num-layers is required"):  # of the tiny model
        main([*there, *without_effect])
    said = capsys.readouterr().out
    for flag in without_effect[:2]:
        assert f"note: {flag} is without effect: " in said
    with pytest.raises(ConfigError, match="msc:/bucket/c: checkpoints are read from local files"):
        main(["inspect", "msc://bucket/c", "--enable-msc"])
