"""Every family of Hugging Face models comes in, computes the same, and goes out bit for bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from megatron.core.config.errors import CheckpointError
from megatron.training.checkpointing.paths import open_checkpoint
from megatron.training.conversion.convert import (
    BESIDE,
    HF,
    ConversionRequest,
    convert,
    read_source,
    run_config,
)
from megatron.training.conversion.hf import family_of
from megatron.training.conversion.verify import our_logits, our_model
from tests.support import hugging_face_models as models
from tests.support import tolerances

OURS = "safetensors_dist"


def quiet(text: str) -> None:
    """Where sentences for the user go."""


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


@pytest.mark.feature(
    "Checkpoints: GPT-2, Llama 1-3, Mistral, Qwen2, Qwen3, Gemma 1-3, Phi-3 and OLMo-2 from and to "
    "Hugging Face, bit for bit"
)
@pytest.mark.feature(
    "Checkpoints: OLMo-3, OLMoE, SmolLM3, EXAONE 4, GLM-4, GLM-4.5, Seed-OSS, Granite, "
    "Ministral 3, Mistral 4, MiniMax-M2, ERNIE 4.5 MoE, Hunyuan-MoE, Kimi-K2, DeepSeek-V3.2, "
    "GLM-5, Kimi-Linear and OLMo-Hybrid from and to Hugging Face"
)
@pytest.mark.parametrize("case", models.CASES)
def test_a_family_in_and_out(case: str, tmp_path: Path) -> None:
    theirs, ours, back, again = (tmp_path / name for name in ("theirs", "ours", "back", "again"))
    models.write(theirs, case)
    convert(ConversionRequest(source=theirs, target=ours, format=OURS, verify=False), quiet)

    # Built from nothing but the arguments in the checkpoint, it has their logits.
    ids = models.prompts()
    expected, _ = models.logits_of(theirs, ids)
    content = open_checkpoint(ours)
    assert content.folder.name == "release"
    run = run_config(content.asked)
    stored = read_source(ConversionRequest(source=ours, target=back, format=HF))
    (found,) = our_logits(run, stored.tensors, models.VOCABULARY, ids)
    torch.testing.assert_close(found, expected, **tolerances.LOGITS)

    # With the config.json that it came with, and with one that is made from our arguments.
    convert(ConversionRequest(source=ours, target=back, format=HF, verify=False), quiet)
    models.assert_same_weights(back, theirs)
    assert config_of(back) == config_of(theirs)
    shutil.rmtree(ours / BESIDE)
    kind = config_of(theirs)["model_type"]
    convert(
        ConversionRequest(source=ours, target=again, format=HF, family=kind, verify=False), quiet
    )
    models.assert_same_weights(again, theirs)
    assert config_of(again)["model_type"] == kind
    logits, heard = models.logits_of(again, ids)
    assert torch.equal(logits, expected)
    assert heard == ""


def test_kimi_k2_is_checked_by_the_class_that_its_config_names(tmp_path: Path) -> None:
    theirs, ours, back = (tmp_path / name for name in ("theirs", "ours", "back"))
    models.write(theirs, "deepseek v3", num_hidden_layers=2)
    config = config_of(theirs) | {
        "model_type": "kimi_k2",
        "auto_map": {"AutoConfig": "code.Config"},
    }
    config["rope_parameters"] |= {"beta_fast": 1.0, "beta_slow": 1.0}
    (theirs / "config.json").write_text(json.dumps(config))
    printed: list[str] = []
    convert(ConversionRequest(source=theirs, target=ours, format=OURS), printed.append)
    assert any("the logits of 3 prompts agree" in line for line in printed)
    convert(ConversionRequest(source=ours, target=back, format=HF, verify=False), quiet)
    models.assert_same_weights(back, theirs)
    assert config_of(back) == config


@pytest.mark.parametrize(
    ("case", "changes", "sentence"),
    [
        ("hunyuan moe", {"moe_topk": [1, 2]}, r"moe_topk \[1, 2\]: only equal values in all"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv 8.0: only None"),
        ("mistral4", {"n_group": 2}, "n_group 2: only 1"),
        ("olmo3", {"layer_types": ["chunked_attention"] * 2}, "layer_types chunked_attention"),
        ("glm-5", {"indexer_types": ["shared", "full"]}, "only one indexer for every N layers"),
        ("glm-5", {"mlp_layer_types": ["wide", "dense"]}, "mlp_layer_types wide"),
        ("seed-oss", {"attention_out_bias": True}, "attention_out_bias True: only False"),
        (
            "olmo3",
            {"rope_parameters": {"full_attention": {**models.WIDE, "attention_factor": 2.0}}},
            "attention_factor 2.0: only the rule is built, which is 1.138",
        ),
    ],
)
def test_what_no_flag_asks_for_is_refused(
    case: str, changes: dict, sentence: str, tmp_path: Path
) -> None:
    models.write(tmp_path, case)
    config = config_of(tmp_path) | changes
    with pytest.raises(CheckpointError, match=sentence):
        family_of(config).shape(config)


@pytest.mark.parametrize(
    ("case", "left_out"),
    [
        ("mistral", "sliding_window"),
        ("exaone4", "sliding_window"),
        ("qwen3-next", "norm_topk_prob"),
    ],
)
def test_a_missing_entry_has_the_default_of_its_config_class(case: str, left_out: str) -> None:
    kind, own = models.CASES[case]
    config_class, _ = models.CLASSES[kind]
    sizes = {"num_hidden_layers": 4, "layer_types": None, "vocab_size": 100}
    own = {name: value for name, value in (own | sizes).items() if name != left_out}
    whole = config_class(**own).to_dict()
    config = {name: value for name, value in whole.items() if name != left_out}
    assert whole[left_out]
    assert family_of(config).shape(config) == family_of(whole).shape(whole)


def test_the_released_form_of_gemma_3_is_read_as_the_newer_one(tmp_path: Path) -> None:
    models.make("gemma3", num_hidden_layers=7, layer_types=None).save_pretrained(tmp_path / "new")
    shutil.copytree(tmp_path / "new", tmp_path / "old")
    config = config_of(tmp_path / "new")
    ropes = config.pop("rope_parameters")
    full = "full_attention"
    windowed = "sliding_attention"
    assert config.pop("layer_types") == [windowed] * 5 + [full, windowed]
    config |= {
        "rope_theta": ropes[full].pop("rope_theta"),
        "rope_scaling": ropes[full],
        "rope_local_base_freq": ropes[windowed]["rope_theta"],
        "sliding_window_pattern": config.pop("_sliding_window_pattern", 6),
    }
    (tmp_path / "old" / "config.json").write_text(json.dumps(config))
    asked = []
    for name in ("new", "old"):
        ours = tmp_path / f"{name}-ours"
        request = ConversionRequest(source=tmp_path / name, target=ours, format=OURS, verify=False)
        convert(request, quiet)
        asked.append(open_checkpoint(ours).asked)
    new, old = asked
    assert old == new
    assert new["window_rotary_base"] == 500
    assert new["window_attn_skip_freq"] == [1, 1, 1, 1, 1, 0, 1]


def test_scaled_positions_of_windowed_layers_are_refused(tmp_path: Path) -> None:
    models.write(tmp_path, "gemma3")
    config = config_of(tmp_path)
    linear = {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}
    config["rope_parameters"]["sliding_attention"] = linear
    (tmp_path / "config.json").write_text(json.dumps(config))
    request = ConversionRequest(source=tmp_path, target=tmp_path / "ours", format=OURS)
    with pytest.raises(CheckpointError, match="rope_type linear of sliding_attention: only"):
        convert(request, quiet)


@pytest.mark.feature(
    "Checkpoints: Mixtral, Qwen2-MoE, Qwen3-MoE and DeepSeek V2 and V3 from and to Hugging Face"
)
@pytest.mark.feature(
    "Model: GPT-2, Llama, Qwen, OLMo 2, Gemma 2: logits and gradients of transformers"
)
@pytest.mark.feature(
    "Model: gpt-oss (sinks, alternating windows, YaRN, experts with biases and clamped gates): "
    "logits and gradients of transformers"
)
@pytest.mark.parametrize("case", models.CASES)
def test_losses_and_gradients_are_theirs(case: str, tmp_path: Path) -> None:
    theirs, ours, gradients = (tmp_path / name for name in ("theirs", "ours", "gradients"))
    model = models.write(theirs, case)
    convert(ConversionRequest(source=theirs, target=ours, format=OURS, verify=False), quiet)
    stored = read_source(ConversionRequest(source=ours, target=ours, format=OURS))
    run = run_config(open_checkpoint(ours).asked)
    mine = our_model(run, stored.tensors, models.VOCABULARY)
    ids = models.prompts()
    labels, positions = ids.roll(-1, 1), torch.arange(ids.shape[1]).expand_as(ids)
    (logits,) = models.outputs_of(model, run, ids)
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    found = mine(ids, positions, None, labels=labels).flatten()
    torch.testing.assert_close(found, expected, **tolerances.LOGITS)
    models.assert_gradients_agree(mine, model, run, ids, gradients)
