"""Every family of Hugging Face models comes in, computes the same, and goes out bit for bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from megatron.training.checkpointing.paths import open_checkpoint
from megatron.training.conversion.convert import (
    BESIDE,
    HF,
    ConversionRequest,
    convert,
    read_source,
    run_config,
)
from megatron.training.conversion.verify import our_logits, our_model
from tests import tolerances
from tests.unit.conversion import models

OURS = "safetensors_dist"


def quiet(text: str) -> None:
    """Where sentences for the user go."""


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


@pytest.mark.feature(
    "Checkpoints: GPT-2, Llama 1-3, Mistral, Qwen2, Qwen3, Gemma 1-2, Phi-3 and OLMo-2 from and to "
    "Hugging Face, bit for bit"
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
