"""Families that read images, as `transformers` has them: logits, gradients and folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from megatron.core.config.errors import CheckpointError
from megatron.training.conversion import hf_folder, vision_language
from megatron.training.conversion.convert import BESIDE, ConversionRequest, convert
from megatron.training.conversion.lazy import as_lazy
from megatron.training.conversion.verify import our_outputs, their_outputs
from megatron.training.conversion.vision_language import flags_of, import_tensors, shape_of_config
from tests.support import tolerances
from tests.support.image_families import FAMILIES, image_family
from tests.unit.conversion.test_vision_language import ours, run_of

IDS = torch.randint(20, 50, (2, 12), generator=torch.Generator().manual_seed(1))
PROCESSOR = '{"image_processor_type": "one of theirs"}\n'


@pytest.mark.feature(
    "Vision: Gemma-3, Qwen3-VL, Qwen3.5 and Mistral 3 with images have the logits and gradients of "
    "transformers' models"
)
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_gradients_are_those_of_transformers(name: str) -> None:
    model = image_family(name)
    config = model.config.to_dict()
    shape = shape_of_config(config)
    mine = ours(config, model.state_dict())
    (found,) = our_outputs(mine, run_of(shape), IDS)
    (wanted,) = their_outputs(model, run_of(shape), IDS)
    torch.testing.assert_close(found, wanted, **tolerances.LOGITS)
    factors = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(2))
    for each in (found, wanted):
        each.backward(factors)
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    expected = import_tensors(shape, as_lazy(gradients))
    for each, param in mine.named_parameters():
        value = expected[each].make()
        assert param.grad is not None, each
        largest = value.abs().max()
        torch.testing.assert_close(
            param.grad / largest, value / largest, rtol=1e-4, atol=1e-5, msg=each
        )


@pytest.mark.feature(
    "Checkpoints: Gemma-3, Qwen3-VL, Qwen3.5 and Mistral 3 with images from Hugging Face and back"
)
@pytest.mark.parametrize("name", FAMILIES)
def test_folders_come_back_bit_by_bit(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = image_family(name)
    model.save_pretrained(tmp_path / "theirs")
    (tmp_path / "theirs" / "preprocessor_config.json").write_text(PROCESSOR)
    said: list[str] = []

    def run(source: str, target: str, form: str) -> Any:
        request = ConversionRequest(source=tmp_path / source, target=tmp_path / target, format=form)
        convert(request, said.append)
        return tmp_path / target

    back = run("theirs", "ours", "safetensors_dist") and run("ours", "back", "hf")
    config = hf_folder.read_config(tmp_path / "theirs")
    assert hf_folder.read_config(back) == config
    assert (back / "preprocessor_config.json").read_text() == PROCESSOR
    wanted = safetensors.torch.load_file(tmp_path / "theirs" / "model.safetensors")
    found = safetensors.torch.load_file(back / "model.safetensors")
    # Released folders have one more name than transformers writes.
    found = {n.replace("vision_tower.vision_model.", "vision_tower."): t for n, t in found.items()}
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[n], tensor) for n, tensor in wanted.items())

    monkeypatch.setattr(vision_language, "image_token", lambda run: model.config.image_token_id)
    (tmp_path / "ours" / BESIDE / "config.json").unlink()
    new = hf_folder.read_config(run("ours", "new", "hf"))
    flags, again = (flags_of(shape_of_config(each)) for each in (config, new))
    lengths = dict.fromkeys(("seq_length", "max_position_embeddings"))  # with those of images
    assert again | lengths == flags | lengths
    compared = [line for line in said if line.startswith("the logits of 3 prompts agree")]
    assert len(compared) == 3, said


@pytest.mark.parametrize(
    ("name", "part", "changes", "message"),
    [
        ("Gemma-3", "vision_config", {"vision_use_head": True}, "vision_use_head True"),
        ("Gemma-3", "vision_config", {"hidden_act": "silu"}, "hidden_act silu"),
        ("Qwen3-VL", "vision_config", {"spatial_merge_size": 3}, "spatial_merge_size 3"),
        ("Qwen3-VL", "vision_config", {"rope_parameters": {"rope_theta": 5.0}}, "rope_theta 5.0"),
        ("Mistral 3", "vision_config", {"hidden_act": "gelu"}, "hidden_act gelu: only silu"),
        ("Mistral 3", "", {"multimodal_projector_bias": True}, "multimodal_projector_bias True"),
        ("Mistral 3", "", {"vision_feature_layer": -2}, "vision_feature_layer -2"),
        ("Mistral 3", "", {"image_token_index": 9}, "image_token_index 9: only 10 can be"),
    ],
)
def test_what_is_not_built_is_refused(
    name: str, part: str, changes: dict[str, Any], message: str
) -> None:
    config = image_family(name).config.to_dict()
    target = config[part] if part else config
    target.update(changes)
    with pytest.raises(CheckpointError, match=message):
        shape_of_config(config)
