"""Calibration in any layout, and what is done with a quantized checkpoint afterwards."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron.core.config.errors import MegatronError
from megatron.core.dist_checkpointing.formats import open_reader
from megatron.core.dist_checkpointing.safetensors_file import read_header
from megatron.core.inference.paged_engine.engine import Engine
from megatron.inference.generation import GenerationLayout
from megatron.post_training.quantization import add_flags, quantize_checkpoint
from megatron.training.conversion.convert import HF, ConversionRequest, convert
from megatron.training.initialize import configure, connect
from tests.support.generation_ranks import generate
from tests.support.ranks import run_ranks
from tests.support.runs import TINY, losses, refusal, run_gpt
from tools.checkpoint.convert import main as convert_main

MODEL = (
    "--hidden-size 256 --ffn-hidden-size 512 --num-attention-heads 4 --group-query-attention "
    "--num-query-groups 2 --swiglu --normalization RMSNorm --position-embedding-type rope "
    "--add-qkv-bias --disable-bias-linear --untie-embeddings-and-output-weights"
).split()
MOE = [*MODEL, *"--num-experts 2 --moe-ffn-hidden-size 256 --moe-router-topk 2".split()]
CALIBRATION = (
    "--use-checkpoint-args --skip-train --no-load-optim --no-load-rng --calib-size 8 "
    "--micro-batch-size 2 --device cpu --mock-data --num-workers 0 --seq-length 32"
).split()


def quantize(rank: int, world_size: int, argv: Sequence[str]) -> str:
    """Calibrate on initialized process groups; return the error message, if there is one."""
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            config = configure(add_flags, {"tokenizer_type": "NullTokenizer"}, argv=argv)
            connect(config)
            quantize_checkpoint(config)
        except MegatronError as error:
            return str(error)
    return ""


def calibrated(load: Path, save: Path, recipe: str, *flags: str, world_size: int = 1) -> Path:
    argv = [*CALIBRATION, "--load", str(load), "--save", str(save), "--export-quant-cfg", recipe]
    (message, *_) = run_ranks(quantize, world_size, [*argv, *flags])
    assert message == ""
    return save


def tensors_of(folder: Path) -> dict[str, Tensor]:
    (newest,) = folder.glob("iter_*")
    with open_reader(newest) as reader:
        return {key: reader.read(key) for key in reader.tensors if not key.startswith("optimizer.")}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    run_gpt(folder / "log", *MODEL, "--save", str(folder / "dense"))
    return folder / "dense"


LAYOUTS = {
    "int8_sq": (
        ("--tensor-model-parallel-size 2", 2),
        ("--tensor-model-parallel-size 2 --sequence-parallel", 2),
        ("--pipeline-model-parallel-size 2", 2),
        ("--micro-batch-size 1", 2),
    ),
    "int4_awq": (("--tensor-model-parallel-size 2 --sequence-parallel", 2),),
    "nvfp4": (("--tensor-model-parallel-size 2", 2),),
    "int4_gptq": (("--tensor-model-parallel-size 2", 2),),
}
# A value near the middle of two codes is rounded to either of them, and GPTQ moves its error on.
FLIPPED = {"int4_gptq": 0.01}


def assert_same(found: Path, expected: Path, flipped: float = 0) -> None:
    theirs, ours = tensors_of(expected), tensors_of(found)
    assert ours.keys() == theirs.keys()
    for key, tensor in ours.items():
        is_other = ~torch.isclose(tensor, theirs[key], rtol=1e-4, atol=1e-6)
        assert is_other.float().mean() <= flipped, key


@pytest.mark.feature("Quantization: calibration finds the same scales in every layout")
@pytest.mark.parametrize("recipe", LAYOUTS)
def test_every_layout_finds_the_same_scales(trained: Path, tmp_path: Path, recipe: str) -> None:
    expected = calibrated(trained, tmp_path / "one", recipe)
    scales = [key for key in tensors_of(expected) if ".quantizer." in key]
    assert len(scales) == 8 * {"int8_sq": 2, "nvfp4": 3}.get(recipe, 1)
    for number, (flags, ranks) in enumerate(LAYOUTS[recipe]):
        save = tmp_path / str(number)
        found = calibrated(trained, save, recipe, *flags.split(), world_size=ranks)
        assert_same(found, expected, FLIPPED.get(recipe, 0))


@pytest.mark.parametrize("recipe", ["int8_sq", "int4_awq"])
def test_experts_of_two_ranks_get_the_scales_of_one(tmp_path: Path, recipe: str) -> None:
    run_gpt(tmp_path / "log", *MOE, "--save", str(tmp_path / "moe"))
    expected = calibrated(tmp_path / "moe", tmp_path / "one", recipe)
    assert any("local_experts.1.linear_fc2.quantizer" in key for key in tensors_of(expected))
    flags = "--expert-model-parallel-size 2 --micro-batch-size 1".split()
    found = calibrated(tmp_path / "moe", tmp_path / "two", recipe, *flags, world_size=2)
    assert_same(found, expected)


@pytest.fixture(scope="module")
def fp8(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return calibrated(trained, tmp_path_factory.mktemp("fp8"), "fp8", "--ckpt-format", "torch_dist")


@pytest.mark.feature("Quantization: QAT resumes in another layout and format")
@pytest.mark.parametrize(
    ("ckpt_format", "layout"),
    [
        ("torch_dist", "--tensor-model-parallel-size 2 --sequence-parallel"),
        ("safetensors_dist", "--context-parallel-size 2 --use-distributed-optimizer"),
    ],
)
def test_training_of_a_quantized_model_resumes_in_another_layout(
    fp8: Path, tmp_path: Path, ckpt_format: str, layout: str
) -> None:
    run = [*MODEL, "--export-quant-cfg", "fp8", "--pretrained-checkpoint", str(fp8)]
    run += ["--ckpt-format", ckpt_format, "--save-interval", "2"]
    whole = run_gpt(tmp_path / "whole", *run, "--save", str(tmp_path / "save"))
    assert len(losses(whole)) == 4
    (tmp_path / "save/latest_checkpointed_iteration.txt").write_text("2")
    folders = ["--load", str(tmp_path / "save"), "--save", str(tmp_path / "last")]
    resumed = run_gpt(
        tmp_path / "rest",
        *run,
        *layout.split(),
        *folders,
        *("--save-hf", str(tmp_path / "live")),
        world_size=2,
    )
    assert losses(resumed) == pytest.approx(losses(whole)[2:], rel=1e-3)
    other = tmp_path / "converted"
    convert(
        ConversionRequest(source=tmp_path / "last", target=other, format=HF, verify=False),
        lambda text: None,
    )
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "live" / name).read_bytes() == (other / name).read_bytes()
    plain = run_gpt(tmp_path / "plain", *MODEL)
    assert abs(losses(plain)[0] - losses(whole)[0]) > 1e-3


@pytest.mark.parametrize(
    ("name", "flags", "message"),
    [
        ("trained", "--export-quant-cfg fp8 --finetune", "calibrate one first (python examples/"),
        ("fp8", "--finetune", "is a quantized checkpoint, and this run does not use its scales"),
        ("fp8", "--finetune --export-quant-cfg int4", "export_quant_cfg: fp8 in the checkpoint"),
        ("", "--export-quant-cfg fp8", "--export-quant-cfg without a checkpoint"),
    ],
)
def test_a_run_that_does_not_fit_the_checkpoint_is_refused(
    request: pytest.FixtureRequest, name: str, flags: str, message: str
) -> None:
    load = ["--load", str(request.getfixturevalue(name))] if name else []
    (said,) = run_ranks(refusal, 1, [*TINY, *MODEL, *load, *flags.split()])
    assert message in said
    assert said.count("Error: ") == 1


@pytest.mark.feature("Quantization: the engine serves codes with the text of the QAT model")
@pytest.mark.parametrize("recipe", ["fp8", "int4_awq"])
def test_stored_codes_write_the_text_of_rounded_weights(
    trained: Path, tmp_path: Path, recipe: str
) -> None:
    saved = calibrated(trained, tmp_path / "save", recipe)
    texts = [run_ranks(served, 1, str(saved), is_stored) for is_stored in (True, False)]
    assert texts[0] == texts[1]
    (sharded, _) = run_ranks(served, 2, str(saved), True)
    (whole,) = texts[0]
    assert [tokens for tokens, _ in sharded] == [tokens for tokens, _ in whole]


def served(rank: int, world_size: int, load: str, is_stored: bool) -> object:
    def keep(chunks: object) -> None:
        del chunks

    patch = contextlib.nullcontext() if is_stored else mock.patch(f"{STORE}.store_weights", keep)
    with patch, contextlib.redirect_stdout(io.StringIO()):
        layout = GenerationLayout(tensor=world_size)
        return generate(rank, world_size, load, [[5, 7, 11], [3]], 12, layout, {})


STORE = "megatron.inference.generation"
CACHE = "--export-kv-cache-quant"


@pytest.mark.feature("Quantization: keys and values in fp8, trained, served and exported")
def test_keys_and_values_are_rounded_in_every_layout(trained: Path, tmp_path: Path) -> None:
    one = calibrated(trained, tmp_path / "one", "int8", CACHE)
    scales = {k: t for k, t in tensors_of(one).items() if k.endswith(("k_scale", "v_scale"))}
    assert len(scales) == 4
    assert all(t > 0 for t in scales.values())
    two = "--tensor-model-parallel-size 2 --sequence-parallel".split()
    assert_same(calibrated(trained, tmp_path / "two", "int8", CACHE, *two, world_size=2), one)
    plain = calibrated(trained, tmp_path / "plain", "int8")
    run = [*MODEL, "--export-quant-cfg", "int8", "--finetune", "--load"]
    cache = losses(run_gpt(tmp_path / "a", *run, str(one), CACHE, "--save", str(tmp_path / "qat")))
    assert cache != losses(run_gpt(tmp_path / "b", *run, str(plain)))
    texts = [run_ranks(served, ranks, str(tmp_path / "qat"), True)[0] for ranks in (1, 2)]
    assert [tokens for tokens, _ in texts[0]] == [tokens for tokens, _ in texts[1]]
    first = tensors_of(tmp_path / "qat")
    for form, name in (("modelopt", "k_proj.k_scale"), ("compressed-tensors", "k_scale")):
        source = one if form == "compressed-tensors" else tmp_path / "fp8"
        if form == "modelopt":
            calibrated(trained, source, "fp8", CACHE)
        request = ConversionRequest(source=source, target=tmp_path / form, format=HF)
        convert(replace(request, quant_form=form, verify=False), print)
        held = read_header(tmp_path / form / "model.safetensors")
        assert f"model.layers.1.self_attn.{name}" in held
        config = json.loads((tmp_path / form / "config.json").read_text())
        assert config["quantization_config"]["kv_cache" + KEYS[form]]
    assert all(torch.equal(first[key], scale) for key, scale in scales.items())


KEYS = {"modelopt": "_quant_algo", "compressed-tensors": "_scheme"}


def test_a_server_loads_another_checkpoint_of_the_recipe(trained: Path, tmp_path: Path) -> None:
    first = calibrated(trained, tmp_path / "first", "int8")
    run = [*MODEL, "--export-quant-cfg", "int8", "--load", str(first), "--finetune"]
    run_gpt(tmp_path / "log", *run, "--lr", "1e-2", "--save", str(tmp_path / "second"))
    (found,) = run_ranks(reloaded, 1, str(first), str(tmp_path / "second"))
    (expected,) = run_ranks(served, 1, str(tmp_path / "second"), True)
    assert found == expected
    (before,) = run_ranks(served, 1, str(first), True)
    assert before != expected


def reloaded(rank: int, world_size: int, load: str, newer: str) -> object:
    write = Engine.generate

    def generate_again(engine: Engine, requests: Any, **more: Any) -> Any:
        engine.update_weights(newer)
        return write(engine, requests, **more)

    with mock.patch.object(Engine, "generate", generate_again):
        return served(rank, world_size, load, True)


def test_a_checkpoint_holds_the_globs_of_its_recipes(trained: Path, tmp_path: Path) -> None:
    file = tmp_path / "globs.yaml"
    file.write_text('"*.linear_fc2": int8\n"*": none\n')
    flags = ["--kitchen-config-file", str(file)]
    saved = calibrated(trained, tmp_path / "save", "int8", *flags)
    file.write_text('"*.linear_fc2": fp8_dynamic\n"*": none\n')  # scales of the same shapes
    (answers,) = run_ranks(served, 1, str(saved), True)
    assert len(answers) == 2
    run = [*TINY, *MODEL, "--load", str(saved), "--finetune", "--export-quant-cfg", "int8"]
    (said,) = run_ranks(refusal, 1, [*run, *flags])
    assert 'kitchen_config_file: {"*.linear_fc2": "int8", "*": "none"} in the checkpoint' in said


def test_bert_is_calibrated_by_training_samples(tmp_path: Path) -> None:
    bert = ["--model-kind", "bert"]
    run_gpt(tmp_path / "log", *bert, "--save", str(tmp_path / "bert"), "--train-iters", "1")
    saved = calibrated(tmp_path / "bert", tmp_path / "save", "int8_sq", *bert)
    scales = [key for key in tensors_of(saved) if key.endswith("input_scale")]
    assert len(scales) == 8, "pooler and heads are in full precision"
    assert all(key.startswith("encoder.layers.") for key in scales)
    argv = [*CALIBRATION, *bert, "--load", str(tmp_path / "bert"), "--save", str(tmp_path / "no")]
    argv += ["--export-quant-cfg", "fp8", "--calib-data", "texts.jsonl"]
    (said,) = run_ranks(quantize, 1, argv)
    assert "rows of text calibrate models like GPT, not BERT" in said


def converted(rank: int, world_size: int, argv: Sequence[str]) -> str:
    """Run convert.py; return its error message, or ""."""
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            convert_main(argv)
        except MegatronError as error:
            return str(error)
    return ""


@pytest.mark.feature("Quantization: convert.py --quant calibrates by --calib-data")
def test_texts_of_a_file_calibrate_a_model(trained: Path, tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    text = " ".join(str(number * number % 100) for number in range(150))
    file.write_text(f'{{"text": "{text}\u2028"}}\n\n{{"text": "{text}"}}\n', encoding="utf-8")
    number = tmp_path / "number.jsonl"
    number.write_text('{"text": 5}')
    flags = ["--finetune", "--calib-data", str(file), "--calib-observer", "percentile"]
    argv = ["--from", str(trained), "--to", str(tmp_path / "hf")]
    argv += "--format hf --quant fp8 --calib-size 4 --no-verify".split()
    argv += ["--calib-data", str(file)]
    (said,) = run_ranks(converted, 1, argv)
    assert said == ""
    held = read_header(tmp_path / "hf/model.safetensors")
    assert "model.layers.1.mlp.down_proj.input_scale" in held
    (said,) = run_ranks(converted, 1, [*argv, "--quant", "int5"])
    assert "--quant with a recipe: int8_sq, fp8" in said
    assert not list(tmp_path.glob("hf.*"))
    saved = calibrated(trained, tmp_path / "save", "w4a8_awq", *flags)
    argv = [*CALIBRATION, "--load", str(trained), "--save", str(tmp_path), *flags]
    (answers,) = run_ranks(served, 1, str(saved), True)
    assert all(len(tokens) == 12 for tokens, _ in answers)
    for extra, message in (
        ("--export-quant-cfg fp8 --calib-size 16", "has 9 rows of --seq-length 32 tokens"),
        ("--export-quant-cfg fp8 --calib-size 1", "a step has 2 samples"),
        (f"--export-quant-cfg fp8 --calib-data {number}", 'line 1: it is no {"text": ...}'),
        ("", "--export-quant-cfg is required: one of int8_sq, fp8,"),
    ):
        (said,) = run_ranks(quantize, 1, [*argv, *extra.split()])
        assert message in said
