"""Hugging Face folders whose linear layers are codes and scales."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from megatron.core.config.errors import CheckpointError
from megatron.core.params.param_info import info_of
from megatron.core.quantization.formats import RECIPES, scale_of, second_scale_of
from megatron.core.quantization.quantizer import (
    FakeQuantizer,
    attach_quantizers,
    quantized_layers,
)
from megatron.training.conversion import hf_folder
from megatron.training.conversion.convert import (
    HF,
    ConversionRequest,
    convert,
    run_config,
    write_checkpoint,
)
from megatron.training.conversion.lazy import as_lazy
from megatron.training.conversion.model_folder import read_folder
from megatron.training.conversion.quantized import plain_numbers
from megatron.training.conversion.quantized_export import MODELOPT
from megatron.training.conversion.source import Source, default_args
from megatron.training.conversion.verify import our_model, our_outputs
from tests.support import hugging_face_models as models
from tests.support import tolerances

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    models.write(folder, "llama", **SIZES)
    return folder


def written(source: Path, target: Path, recipe: str, form: str = "compressed-tensors") -> str:
    said: list[str] = []
    text = target.parent / "text"
    text.write_text("7 11 13 5 " * 30)
    request = ConversionRequest(
        source=source,
        target=target,
        format=HF,
        quant=recipe,
        quant_form=form,
        report_text=text,
    )
    convert(request, said.append)
    assert any("give --calib-data FILE" in text for text in said) == (recipe != "int4")
    return said[-2]


def outputs_of(folder: Path, recipe: str | None = None) -> torch.Tensor:
    """Return the logits of ``folder``, with fake quantization of its weights by ``recipe``."""
    found = read_folder(folder)
    run = run_config(default_args() | found.args(folder, folder))
    model = our_model(run, found.tensors, models.VOCABULARY)
    if recipe is not None:
        weights_alone = replace(RECIPES[recipe], input=None)
        attach_quantizers(model, lambda name: weights_alone)
        for layer, quantizer in quantized_layers([model]):
            assert layer.weight is not None
            quantizer.set_weight_scales(layer.weight)
    with torch.no_grad():
        return next(iter(our_outputs(model, run, models.prompts(20))))


@pytest.mark.feature("Checkpoints: convert.py --quant writes folders of compressed-tensors")
@pytest.mark.parametrize("recipe", ["int4", "int8_sq", "fp8", "nvfp4"])
def test_codes_are_the_values_of_fake_quantization(
    source: Path, tmp_path: Path, recipe: str
) -> None:
    said = written(source, tmp_path / "out", recipe)
    assert "MB in place of" in said
    found = re.search(r"changes logits by .* perplexity (.*) before, (.*) after; .* tokens/s", said)
    assert found is not None
    assert found[1] != found[2]
    expected = outputs_of(source, recipe)
    torch.testing.assert_close(outputs_of(tmp_path / "out"), expected, **tolerances.LOGITS)
    assert not torch.equal(outputs_of(source), expected)
    settings = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert settings["ignore"] == ["model.embed_tokens", "lm_head"]


def test_modelopt_writes_its_names_and_its_config(source: Path, tmp_path: Path) -> None:
    written(source, tmp_path / "out", "nvfp4", MODELOPT)
    found = models.weights(tmp_path / "out")
    layer = "model.layers.1.mlp.up_proj."
    own = {
        name.removeprefix(layer): (t.dtype, t.dim()) for name, t in found.items() if layer in name
    }
    assert own == {
        "weight": (torch.uint8, 2),
        "weight_scale": (torch.float8_e4m3fn, 2),
        "weight_scale_2": (torch.float32, 0),
    }
    config = json.loads((tmp_path / "out/hf_quant_config.json").read_text())
    assert config["quantization"]["quant_algo"] == "W4A16_NVFP4"
    expected = outputs_of(source, "nvfp4")
    torch.testing.assert_close(outputs_of(tmp_path / "out"), expected, **tolerances.LOGITS)


def test_scales_of_a_calibrated_checkpoint_are_used(source: Path, tmp_path: Path) -> None:
    found = read_folder(source)
    args = default_args() | found.args(source, source) | {"export_quant_cfg": "fp8"}
    layer = "decoder.layers.0.self_attention.linear_qkv"
    args["kitchen_config_file"] = '{"*.layers.1.*": "none"}'
    names = [name for name in found.tensors if "layers.0." in name and "linear_" in name]
    buffers = {
        f"{name.removesuffix('weight')}quantizer.{own}": torch.full((1, 1), value)
        for name in names
        for own, value in (("weight_scale", 0.5), ("input_scale", 0.25))
    }
    args["model_kind"] = "gpt"
    calibrated = Source(
        tensors={**found.tensors, **as_lazy(buffers)}, args=args, common={}, layout={}
    )
    ours = ConversionRequest(source=source, target=tmp_path / "ours", format="safetensors_dist")
    write_checkpoint(calibrated, ours, lambda text: None)
    request = replace(ours, source=tmp_path / "ours", target=tmp_path / "out", format=HF)
    convert(request, lambda text: None)
    held = models.weights(tmp_path / "out")
    for part in "qkv":
        name = f"model.layers.0.self_attn.{part}_proj."
        assert held[f"{name}weight_scale"].tolist() == [0.5]
        assert held[f"{name}input_scale"].tolist() == [0.25]
    assert f"{layer}.weight" in names
    assert not any("layers.1." in name and "scale" in name for name in held)
    for other in ("onnx", "trtllm", "torch"):
        with pytest.raises(CheckpointError, match=f"--format {other}: the checkpoint is quantized"):
            convert(replace(request, target=tmp_path / "no", format=other), lambda text: None)
    with pytest.raises(CheckpointError, match="--quant int8: the checkpoint is calibrated for fp8"):
        convert(replace(request, target=tmp_path / "no", quant="int8"), lambda text: None)
    args["kitchen_config_file"] = '{"*.linear_qkv": "int8"}'
    write_checkpoint(replace(calibrated, args=args), replace(ours, target=tmp_path / "two"), print)
    with pytest.raises(CheckpointError, match="calibrated for fp8 and int8 by --kitchen-config"):
        convert(replace(request, source=tmp_path / "two", target=tmp_path / "no"), print)


@pytest.mark.feature("Checkpoints: transformers computes the logits of a calibrated checkpoint")
@pytest.mark.parametrize(
    "recipe", ["int8_sq", "int8_dynamic", "fp8_dynamic", "fp8_blockwise_32", "w4a8_awq", "nvfp4"]
)
def test_transformers_rounds_inputs_as_fake_quantization_does(
    source: Path, tmp_path: Path, recipe: str
) -> None:
    pytest.importorskip("compressed_tensors")
    found = read_folder(source)
    args = default_args() | found.args(source, source)
    run = run_config(args)
    model = our_model(run, found.tensors, models.VOCABULARY)
    attach_quantizers(model, lambda name: RECIPES[recipe])
    ids = models.prompts(20)
    layers = list(quantized_layers([model]))

    def set_input_scale(quantizer: FakeQuantizer, x: torch.Tensor) -> None:
        to = quantizer.recipe.input
        if quantizer.input_scale is not None and to is not None:
            found = second_scale_of if to.has_two_levels else partial(scale_of, to=to)
            quantizer.input_scale.copy_(found(x.abs().amax().view(1, 1)))

    for layer, quantizer in layers:
        assert layer.weight is not None
        quantizer.set_weight_scales(layer.weight)
        if recipe == "fp8_blockwise_32":  # training has moved the weights since calibration
            quantizer.weight_scale *= 1.25
        quantizer.observe = partial(set_input_scale, quantizer)
    with torch.no_grad():
        (unrounded,) = our_outputs(model, run, ids)
        for _, quantizer in layers:
            quantizer.observe = None
        (expected,) = our_outputs(model, run, ids)
    buffers = {info_of(b).name: b for _, quantizer in layers for b in quantizer.buffers()}
    calibrated = Source(
        tensors={**found.tensors, **as_lazy(buffers)},
        args={**args, "export_quant_cfg": recipe, "model_kind": "gpt"},
        common={},
        layout={},
    )
    ours = ConversionRequest(source=source, target=tmp_path / "ours", format="safetensors_dist")
    write_checkpoint(calibrated, ours, lambda text: None)
    request = replace(ours, source=tmp_path / "ours", target=tmp_path / "out", format=HF)
    convert(request, lambda text: None)
    load = models.transformers.AutoModelForCausalLM.from_pretrained
    theirs = load(tmp_path / "out", dtype=torch.float32).eval()
    if recipe == "nvfp4":
        hold_exact_values(theirs, tmp_path / "out", ids)
    with torch.no_grad():
        actual = theirs(ids).logits
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-3)
    assert (expected - unrounded).abs().max() > 0.05


def hold_exact_values(model: torch.nn.Module, folder: Path, ids: torch.Tensor) -> None:
    """Replace the values of nvfp4, which compressed-tensors rounds to bf16 at the first pass."""
    with pytest.raises(RuntimeError, match="same dtype"):
        model(ids)
    torch.nn.Module.float(model)
    exact = plain_numbers(hf_folder.read_weights(folder), hf_folder.read_config(folder))
    for name, layer in model.named_modules():
        if hasattr(layer, "quantization_scheme"):
            values = exact[f"{name}.weight"].make()
            torch.testing.assert_close(layer.weight.data, values, rtol=2**-7, atol=0)
            layer.weight.data = values


@pytest.mark.parametrize(
    ("recipe", "form", "format", "case", "sentence"),
    [
        ("int5", "compressed-tensors", HF, None, "--quant int5: the recipes are int8_sq, fp8"),
        ("int4", MODELOPT, HF, None, "written are nvfp4, fp8_blockwise, fp8_dynamic"),
        ("int4", "compressed-tensors", "torch_dist", None, "--format torch_dist: --format hf"),
        ("int4", "compressed-tensors", HF, "llama", "no multiple of 128, .*the recipes are"),
        ("int8", "compressed-tensors", HF, "gpt2", "is no matrix .out, in. of a linear layer"),
    ],
)
def test_what_cannot_be_written_is_named(
    source: Path,
    tmp_path: Path,
    recipe: str,
    form: str,
    format: str,
    case: str | None,
    sentence: str,
) -> None:
    if case is not None:
        source = tmp_path / "small"
        models.write(source, case)
    request = ConversionRequest(
        source=source,
        target=tmp_path / "out",
        format=format,
        quant=recipe,
        quant_form=form,
        verify=False,
    )
    with pytest.raises(CheckpointError, match=sentence):
        convert(request, lambda text: None)
    assert not (tmp_path / "out").exists()
