"""ViT image classifiers of `transformers`: logits, and folders that come back bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.config.errors import CheckpointError
from megatron.training.conversion import hf_folder
from megatron.training.conversion.convert import BESIDE, ConversionRequest, convert
from megatron.training.conversion.vision import flags_of_classifier

OURS = "safetensors_dist"


def theirs(folder: Path, **changes: Any) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
        **{"intermediate_size": 48, "image_size": 12, "patch_size": 4, "num_labels": 7},
        **changes,
    )
    torch.manual_seed(3)
    model = transformers.ViTForImageClassification(config)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.1 * torch.randn_like(param))
    model.save_pretrained(folder)


def converted(source: Path, target: Path, form: str, said: list[str]) -> None:
    convert(ConversionRequest(source=source, target=target, format=form), said.append)


@pytest.mark.feature("Checkpoints: ViT image classifiers from Hugging Face and back")
def test_the_converter_compares_logits_and_restores_the_folder(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs(tmp_path / "theirs")
    said: list[str] = []
    converted(tmp_path / "theirs", tmp_path / "ours", OURS, said)
    converted(tmp_path / "ours", tmp_path / "back", "hf", said)
    (tmp_path / "ours" / BESIDE / "config.json").unlink()
    converted(tmp_path / "ours", tmp_path / "new", "hf", said)
    compared = [line for line in said if line.startswith("the logits of 2 images agree")]
    assert len(compared) == 3, said
    folders = [tmp_path / name for name in ("theirs", "back", "new")]
    config, back, new = map(hf_folder.read_config, folders)
    assert back == config
    assert flags_of_classifier(new) == flags_of_classifier(config)
    auto = transformers.AutoModelForImageClassification
    one, *others = (auto.from_pretrained(folder).state_dict() for folder in folders)
    for other in others:
        assert one.keys() == other.keys()
        for name, tensor in one.items():
            assert torch.equal(other[name], tensor), name


def test_what_cannot_be_converted_is_refused(tmp_path: Path) -> None:
    theirs(tmp_path / "relu", hidden_act="relu")
    with pytest.raises(CheckpointError, match="hidden_act relu: only gelu can be converted"):
        converted(tmp_path / "relu", tmp_path / "ours", OURS, [])
    theirs(tmp_path / "gelu")
    with pytest.raises(CheckpointError, match="--format torch_dist: Megatron-LM's image class"):
        converted(tmp_path / "gelu", tmp_path / "ours", "torch_dist", [])
