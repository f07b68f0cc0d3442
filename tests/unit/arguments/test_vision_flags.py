"""Flags of Megatron-LM's multimodal examples and of its scripts for ModelOpt."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.core.config.errors import ConfigError
from megatron.training.models.vlm import read_prompts
from tests.support.command_lines import problems_of, run_of

VLM = "--model-kind vlm --img-h 24 --img-w 24 --patch-dim 6"
MODELOPT = (
    "--export-te-mcore-model --export-force-local-attention --export-model-type MambaModel "
    "--finetune-hf-dataset chats.jsonl --finetune-data-split test"
)


def test_the_flags_of_the_multimodal_examples_are_accepted() -> None:
    idle = {
        "--use-te": "",
        "--language-model-type": "llama3_8b",
        "--packing-seq-length": "64",
        "--dataset-config": "data.yaml",
        "--eos-id": "2",
        "--use-mcore-inference": "",
    }
    words = " ".join(f"{flag} {value}" for flag, value in idle.items())
    run = run_of(
        f"{VLM} {words} --prompt-path prompts.json --use-loss-scaling "
        "--allow-missing-vision-projection-checkpoint"
    )
    assert run.vision.use_loss_scaling
    assert run.checkpoint.allow_missing_vision_projection_checkpoint
    for flag in idle:
        assert any(w.startswith(flag) and "without effect" in w for w in run.warnings), flag


@pytest.mark.parametrize(
    "words",
    [
        "--vision-model-type radio",
        "--vision-model-type cradio-g",
        "--online-evaluation-config tasks.yaml",
        "--load-model-opt-format",
    ],
)
def test_what_this_program_lacks_is_refused_with_a_way_out(words: str) -> None:
    assert any(p.startswith(words.split()[0]) and "use" in p for p in problems_of(f"{VLM} {words}"))


def test_the_flags_of_scripts_for_modelopt_are_accepted() -> None:
    run = run_of(f"{MODELOPT} --export-qk-l2-norm")
    assert run.model.qk_l2_norm
    for flag in (word for word in MODELOPT.split() if word.startswith("--")):
        assert any(w.startswith(flag) for w in run.warnings), flag
    words = "--num-experts 2 --moe-router-topk 1 --moe-router-pre-softmax"
    assert run_of(f"{words} --export-moe-apply-probs-on-input").model.moe_apply_probs_on_input


def test_questions_before_captions_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "prompts.json"
    path.write_text(
        json.dumps({"CaptioningPretraining": {"raw": ["Describe."], "llava": ["A", "B"]}})
    )
    assert read_prompts(str(path)) == ("A", "B")
    path.write_text(json.dumps({"CaptioningPretraining": {"raw": [1]}}))
    with pytest.raises(ConfigError, match="--prompt-path .*use --caption-prompt"):
        read_prompts(str(path))
