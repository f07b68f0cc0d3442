"""ONNX graphs of models: onnxruntime computes and generates what our modules do."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from examples.export.onnx import generate as program
from megatron.core import optional
from megatron.core.config.errors import CheckpointError, MissingDependency
from megatron.inference.generation import GenerationLayout
from megatron.training.conversion.convert import ConversionRequest, convert, read_source, run_config
from megatron.training.conversion.verify import our_model
from tests.support import hugging_face_models as models
from tests.support.generation_ranks import generate
from tests.support.ranks import run_ranks
from tests.support.runs import run_gpt
from tests.unit.conversion.test_image_classifier import theirs as write_vit

STAGES = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}


def converted(source: Path, target: Path, format: str, **more: Any) -> list[str]:
    said: list[str] = []
    convert(ConversionRequest(source=source, target=target, format=format, **more), said.append)
    return said


def exported(case: str, folder: Path, format: str, **changes: Any) -> tuple[Any, dict[str, Any]]:
    """Export a model from a checkpoint of two by two ranks; return our model and the report.

    The format torch has a file for each rank; the others record the ranks in their arguments.
    """
    models.write(folder / "hf", case, **changes)
    args = STAGES if case != "t5" else {"tensor_model_parallel_size": 2}
    converted(folder / "hf", folder / "ours", format, verify=False, args=args)
    (said, *_) = converted(folder / "ours", folder / "onnx", "onnx")
    assert re.fullmatch(r"onnxruntime computes the model's logits within .* tokens/s here", said)
    source = read_source(ConversionRequest(source=folder / "ours", target=folder, format="onnx"))
    ours = our_model(run_config(source.args), source.weights, models.VOCABULARY)
    return ours, json.loads((folder / "onnx" / "report.json").read_text())


def session(folder: Path, name: str = "model") -> Any:
    runtime = pytest.importorskip("onnxruntime")
    return runtime.InferenceSession(str(folder / "onnx" / f"{name}.onnx"))


@torch.no_grad()
def greedy(model: Any, ids: torch.Tensor, num_tokens: int) -> torch.Tensor:
    for _ in range(num_tokens):
        places = torch.arange(ids.shape[1]).expand_as(ids)
        ids = torch.cat([ids, model(ids, places, None)[:, -1:].argmax(-1)], 1)
    return ids


@pytest.mark.feature(
    "Export: ONNX graphs of GPT and T5 with KV-cache inputs, BERT and ViT, from any layout"
)
@pytest.mark.parametrize(
    ("case", "format", "changes"),
    [
        ("gpt2", "torch", {"n_layer": 2, "n_positions": 80}),
        ("gemma2", "torch_dist", {"num_hidden_layers": 2, "max_position_embeddings": 80}),
        ("qwen2 moe", "torch_dist", {"num_hidden_layers": 2, "max_position_embeddings": 80}),
    ],
)
def test_gpt_generates_the_same_64_tokens(
    case: str, format: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    pytest.importorskip("onnxruntime")
    ours, report = exported(case, tmp_path, format, **changes)
    assert report["max_logit_error"] < 1e-4
    prompts = models.prompts()[:, :7]
    expected = greedy(ours, prompts, 64)
    graph = session(tmp_path)
    assert np.array_equal(program.generate(graph, prompts.numpy(), 64), expected)
    # A short prompt in the batch of a long one, with padding before it.
    padded = np.array([[0, 0, *prompts[0, :5]], [*prompts[1]]])
    mask = np.array([[0, 0, 1, 1, 1, 1, 1], [1] * 7])
    found = program.generate(graph, padded, 9, mask)
    assert np.array_equal(found[0, 2:], greedy(ours, prompts[:1, :5], 9)[0])
    assert np.array_equal(found[1], expected[1, :16])


@pytest.mark.feature("Export: ONNX from a training run of TP2 PP2 writes the engine's 64 tokens")
def test_a_run_of_four_ranks_is_exported(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    flags = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --swiglu --lr 1e-2 "
    flags += "--position-embedding-type rope --max-position-embeddings 80 --init-method-std 0.2"
    run_gpt(tmp_path, *flags.split(), "--save", str(tmp_path / "ours"), world_size=4)
    converted(tmp_path / "ours", tmp_path / "onnx", "onnx")
    prompts = [[3, 4, 5], [60, 61, 62]]
    load = str(tmp_path / "ours")
    (found,) = run_ranks(generate, 1, load, prompts, 64, GenerationLayout(), {})
    tokens = program.generate(session(tmp_path), np.array(prompts), 64)[:, 3:].tolist()
    assert tokens == [written for written, _ in found]
    assert len({token for row in tokens for token in row}) > 8


def test_t5_generates_the_same_64_tokens(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    ours, report = exported("t5", tmp_path, "safetensors_dist")
    assert report["max_logit_error"] < 1e-4
    prompts = models.prompts()[:, :7]
    out = torch.zeros(len(prompts), 1, dtype=torch.long)
    with torch.no_grad():
        for _ in range(64):
            out = torch.cat([out, ours(prompts, out)[:, -1:].argmax(-1)], 1)
    graphs = (session(tmp_path, f"{name}_model") for name in ("encoder", "decoder"))
    assert np.array_equal(program.generate_from(*graphs, prompts.numpy(), 64), out[:, 1:])


def test_bert_hides_padding_and_vit_takes_any_batch(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    ours, report = exported("bert", tmp_path, "torch", num_hidden_layers=2)
    assert report["max_logit_error"] < 1e-4
    ids = models.prompts()[:1, :6]
    padded = np.pad(ids.numpy(), ((0, 0), (0, 3)))
    inputs = {"input_ids": padded, "attention_mask": padded * 0, "token_type_ids": padded * 0}
    inputs["attention_mask"][:, :6] = 1
    logits, _ = session(tmp_path).run(None, inputs)
    expected = ours(ids, None, torch.zeros_like(ids))[0].detach().numpy()
    np.testing.assert_allclose(logits[:, :6], expected, atol=1e-4)

    vit = tmp_path / "vit"
    write_vit(vit / "hf")
    converted(vit / "hf", vit / "ours", "safetensors_dist", verify=False, args=STAGES)
    converted(vit / "ours", vit / "onnx", "onnx")
    images = np.zeros((3, 3, 12, 12), np.float32)
    assert session(vit).run(None, {"pixel_values": images})[0].shape == (3, 7)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("mamba2", "the model is Mamba; exported are GPT, BERT, T5"),
    ],
)
def test_a_model_without_a_graph_is_refused(case: str, reason: str, tmp_path: Path) -> None:
    models.write(tmp_path / "hf", case)
    converted(tmp_path / "hf", tmp_path / "ours", "safetensors_dist", verify=False)
    with pytest.raises(CheckpointError, match=f"--format onnx: {reason}.*use --format hf"):
        converted(tmp_path / "ours", tmp_path / "onnx", "onnx")
    assert not (tmp_path / "onnx").exists()


def test_a_missing_package_and_a_folder_that_exists_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models.write(tmp_path / "hf", "llama", num_hidden_layers=1)
    converted(tmp_path / "hf", tmp_path / "ours", "safetensors_dist", verify=False)
    with pytest.raises(CheckpointError, match="hf is there already: name a new folder"):
        converted(tmp_path / "ours", tmp_path / "hf", "onnx")
    monkeypatch.setattr(optional, "why_missing", lambda package: f"{package} is not installed")
    with pytest.raises(MissingDependency, match=r"--format onnx: onnx is .*megatron-train\[onnx\]"):
        converted(tmp_path / "ours", tmp_path / "onnx", "onnx")
    assert not (tmp_path / "onnx").exists()
