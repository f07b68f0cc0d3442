"""Qwen2-VL by the converter: logits of transformers, and folders that come back bit by bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.core.config.errors import CheckpointError
from megatron.training.conversion import hf_folder, vision_language
from megatron.training.conversion.convert import BESIDE, ConversionRequest, convert
from megatron.training.conversion.vision_language import flags_of, shape_of_config
from tests.unit.models.test_mrope import IMAGE_TOKEN, qwen

OURS = "safetensors_dist"


def converted(tmp_path: Path) -> list[str]:
    """Convert a random model to ours and back; return what the converter says."""
    qwen().save_pretrained(tmp_path / "theirs")
    said: list[str] = []
    for source, target, form in (("theirs", "ours", OURS), ("ours", "back", "hf")):
        request = ConversionRequest(source=tmp_path / source, target=tmp_path / target, format=form)
        convert(request, said.append)
    return said


@pytest.mark.feature("Checkpoints: Qwen2-VL from Hugging Face and back, with equal logits")
def test_the_converter_compares_logits_and_restores_the_folder(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    said = converted(tmp_path)
    compared = [line for line in said if line.startswith("the logits of 3 prompts agree")]
    assert len(compared) == 2, said
    folders = [tmp_path / name for name in ("theirs", "back")]
    config, back = map(hf_folder.read_config, folders)
    assert back == config
    auto = transformers.AutoModelForImageTextToText
    one, other = (auto.from_pretrained(folder).state_dict() for folder in folders)
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(other[name], tensor), name


def test_a_model_without_config_json_gets_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    converted(tmp_path)
    monkeypatch.setattr(vision_language, "image_token", lambda run: IMAGE_TOKEN)  # no tokenizer
    (tmp_path / "ours" / BESIDE / "config.json").unlink()
    said: list[str] = []
    request = ConversionRequest(source=tmp_path / "ours", target=tmp_path / "new", format="hf")
    convert(request, said.append)
    assert any(line.startswith("the logits of 3 prompts agree") for line in said)
    shapes = [shape_of_config(hf_folder.read_config(tmp_path / n)) for n in ("theirs", "new")]
    wanted, found = map(flags_of, shapes)
    lengths = ("seq_length", "max_position_embeddings")  # with those of images
    assert {n: v for n, v in found.items() if n not in lengths} == {
        n: v for n, v in wanted.items() if n not in lengths
    }


def test_released_config_json_has_the_entries_of_the_text_in_it() -> None:
    released = {
        "model_type": "qwen2_vl",
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "max_position_embeddings": 32768,
        "max_window_layers": 28,
        "num_attention_heads": 12,
        "num_hidden_layers": 28,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "image_token_id": 151655,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
        "vision_config": {
            **{"depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16, "in_chans": 3},
            **{"hidden_size": 1536, "patch_size": 14, "spatial_merge_size": 2},
            **{"spatial_patch_size": 14, "temporal_patch_size": 2},
        },
    }
    flags = flags_of(shape_of_config(released))
    assert flags["mrope_section"] == (16, 24, 24)
    assert flags["vision_num_layers"] == 32
    assert flags["vision_ffn_hidden_size"] == 5120
    assert not flags["untie_embeddings_and_output_weights"]
    vision = released["vision_config"] | {"temporal_patch_size": 1}
    with pytest.raises(CheckpointError, match="temporal_patch_size 1: only 2 can be converted"):
        shape_of_config(released | {"vision_config": vision})
