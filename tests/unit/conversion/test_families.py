"""Every family of Hugging Face models comes in, computes the same, and goes out bit for bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from megatron.training.checkpointing.paths import open_checkpoint
from megatron.training.conversion.convert import (
    BESIDE,
    HF,
    Wanted,
    convert,
    read_source,
    run_config,
)
from megatron.training.conversion.verify import our_logits
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
    convert(Wanted(source=theirs, target=ours, format=OURS, verify=False), quiet)

    # Built from nothing but the arguments in the checkpoint, it has their logits.
    ids = models.prompts()
    expected, _ = models.logits_of(theirs, ids)
    content = open_checkpoint(ours)
    assert content.folder.name == "release"
    run = run_config(content.asked)
    stored = read_source(Wanted(source=ours, target=back, format=HF))
    found = our_logits(run, stored.tensors, models.VOCABULARY, ids)
    torch.testing.assert_close(found, expected, **tolerances.LOGITS)

    # With the config.json that it came with, and with one that is made from our arguments.
    convert(Wanted(source=ours, target=back, format=HF, verify=False), quiet)
    models.assert_same_weights(back, theirs)
    assert config_of(back) == config_of(theirs)
    shutil.rmtree(ours / BESIDE)
    kind = config_of(theirs)["model_type"]
    convert(Wanted(source=ours, target=again, format=HF, family=kind, verify=False), quiet)
    models.assert_same_weights(again, theirs)
    assert config_of(again)["model_type"] == kind
    logits, heard = models.logits_of(again, ids)
    assert torch.equal(logits, expected)
    assert heard == ""
