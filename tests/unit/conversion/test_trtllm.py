"""Checkpoints of TensorRT-LLM: each rank has its slices of the weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron.core.config.errors import CheckpointError, ConfigError
from megatron.core.export.trtllm.engine_builder.trtllm_engine_builder import TRTLLMEngineBuilder
from megatron.core.export.trtllm.trtllm_layers import DEFAULT_CONVERSION_DICT, TRTLLMLayers
from megatron.training.conversion.convert import ConversionRequest, convert
from tests.support import hugging_face_models as models
from tools.checkpoint import convert as tool

LAYOUT = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}


def exported(case: str, folder: Path, args: dict[str, int], **changes: Any) -> list[str]:
    models.write(folder / "hf", case, **changes)
    said: list[str] = []
    ours = folder / "ours"
    request = ConversionRequest(
        source=folder / "hf", target=ours, format="torch_dist", verify=False
    )
    convert(request, said.append)
    request = ConversionRequest(source=ours, target=folder / "out", format="trtllm", args=args)
    said.clear()
    convert(request, said.append)
    return said


def rank_files(folder: Path) -> list[dict[str, Tensor]]:
    count = json.loads((folder / "config.json").read_text())["mapping"]["world_size"]
    assert len(list(folder.glob("rank*.safetensors"))) == count
    return [load_file(folder / f"rank{rank}.safetensors") for rank in range(count)]


@pytest.mark.feature("Export: checkpoints of TensorRT-LLM, a file for each rank of any layout")
@pytest.mark.parametrize("case", ["llama", "mixtral"])
def test_each_rank_has_its_slices_of_the_hugging_face_weights(case: str, tmp_path: Path) -> None:
    changes = {"sliding_window": None} if case == "mixtral" else {}
    said = exported(case, tmp_path, LAYOUT, num_hidden_layers=4, **changes)
    assert "NVIDIA deprecates" in said[-1]
    theirs = models.weights(tmp_path / "hf")
    for rank, found in enumerate(rank_files(tmp_path / "out")):
        tp = rank % 2
        stage = rank // 2

        def half(name: str, dim: int = 0, tp: int = tp) -> Tensor:
            return theirs[name].chunk(2, dim)[tp]

        expected = {
            f"transformer.layers.{i}.{name}": tensor
            for i in range(2)
            for name, tensor in layer_of(f"model.layers.{i + 2 * stage}.", case, half).items()
        }
        if stage == 0:
            expected["transformer.vocab_embedding.weight"] = theirs["model.embed_tokens.weight"]
        else:
            expected["transformer.ln_f.weight"] = theirs["model.norm.weight"]
            expected["lm_head.weight"] = half("lm_head.weight")
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def layer_of(layer: str, case: str, half: Callable[..., Tensor]) -> dict[str, Tensor]:
    attention = f"{layer}self_attn."
    out = {
        "attention.qkv.weight": torch.cat([half(f"{attention}{x}_proj.weight") for x in "qkv"]),
        "attention.dense.weight": half(f"{attention}o_proj.weight", 1),
    }
    for name in ("input_layernorm", "post_attention_layernorm"):
        whole = [half(f"{layer}{name}.weight", tp=tp) for tp in (0, 1)]
        out[f"{name.replace('_attention', '')}.weight"] = torch.cat(whole)
    if case == "llama":
        out["mlp.fc.weight"] = half(f"{layer}mlp.gate_proj.weight")
        out["mlp.gate.weight"] = half(f"{layer}mlp.up_proj.weight")
        out["mlp.proj.weight"] = half(f"{layer}mlp.down_proj.weight", 1)
        return out
    experts = f"{layer}block_sparse_moe."
    out["mlp.router.weight"] = torch.cat([half(f"{experts}gate.weight", tp=tp) for tp in (0, 1)])
    up, gate, down = (
        [half(f"{experts}experts.{e}.{name}.weight", dim) for e in range(4)]
        for name, dim in (("w3", 0), ("w1", 0), ("w2", 1))
    )
    out["mlp.fc.weight"] = torch.cat([torch.stack(up), torch.stack(gate)], 1)
    out["mlp.proj.weight"] = torch.stack(down)
    return out


@pytest.mark.parametrize(
    ("case", "args", "reason"),
    [
        ("mamba2", {}, "--format trtllm: the model is Mamba, and only GPT models are converted"),
        ("qwen3", {}, r"LlamaForCausalLM \(llama\) has no qk_norm head.*use --format hf"),
        ("llama", {"tensor_model_parallel_size": 3}, "size 3: .* cannot share 4 attention heads"),
        ("llama", {"expert_model_parallel_size": 2}, "ranks of --format trtllm share every expert"),
    ],
)
def test_what_the_format_cannot_take_is_refused(
    case: str, args: dict[str, int], reason: str, tmp_path: Path
) -> None:
    with pytest.raises((CheckpointError, ConfigError), match=reason):
        exported(case, tmp_path, args)
    assert not (tmp_path / "out").exists()


def test_engines_and_unknown_names_are_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match="trtllm-build --checkpoint_dir DIR --output_dir E"):
        TRTLLMEngineBuilder.build_and_save_engine("E", {}, None)
    rename = TRTLLMLayers.rename_input_layer_names_to_trtllm_layer_names
    with pytest.raises(ConfigError, match=r"no place for decoder\.layers\.1\.mixer\.A"):
        rename({"decoder.layers.1.mixer.A": 0}, DEFAULT_CONVERSION_DICT)


def test_the_tool_knows_the_formats() -> None:
    words = "--from A --to B --format trtllm --tensor-parallel 2 --pipeline-parallel 3"
    wanted = tool.wanted_of(tool.get_parser().parse_args(words.split()))
    assert wanted.format == "trtllm"
    assert wanted.args["pipeline_model_parallel_size"] == 3
