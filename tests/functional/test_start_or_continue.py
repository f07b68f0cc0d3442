"""A command that starts from other weights is killed and repeated: it continues its own run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.training.conversion.convert import convert
from megatron.training.conversion.source import ConversionRequest
from tests.golden import trl_preference
from tests.support import selection
from tests.support.rl_runs import numbers, run_rl
from tests.support.runs import TINY, run_gpt

pytest.importorskip("tokenizers")
pytest.importorskip("transformers")

STEPS = ("--train-iters", "4", "--save-interval", "2", "--eval-iters", "0")
TUNING = (
    "--device cpu --use-checkpoint-args --tokenizer-type HuggingFaceTokenizer --seq-length 64 "
    "--lr 1e-3 --log-interval 1 --eval-interval 1000 --eval-iters 0 --num-workers 0 "
    "--micro-batch-size 1 --global-batch-size 2"
).split()
PRETRAINING = {
    "pretraining": "--finetune",
    "pretraining in torch_dist": "--finetune --ckpt-format torch_dist --async-save",
    "pretraining in the legacy format": "--finetune --ckpt-format torch",
    "adapters": "--lora-rank 4",
    "experts from a dense checkpoint": "--moe-use-upcycling --num-experts 4",
    "distillation": "--finetune --export-kd-teacher-load BASE",
}
DEFAULT = ["pretraining in torch_dist", "adapters", "distillation"]
FINE_TUNING = {
    "conversations": "--sft --train-data-path FOLDER/rows.jsonl",
    "conversations, after --finetune": "--sft --finetune --train-data-path FOLDER/rows.jsonl",
    "DPO": "--dpo-beta 0.1 --finetune --train-data-path FOLDER/pairs.jsonl",
    "a reward model": "--reward-model --finetune --train-data-path FOLDER/pairs.jsonl",
}


def check_that_it_continues(
    run: Callable[[], list[dict[str, Any]]], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kill ``run`` while it saves step 4, and repeat it: it goes on from step 2, by bits."""
    monkeypatch.setenv("FAULTS", "save.before_rename:kill:step4")
    with pytest.raises(AssertionError, match="SIGKILL"):
        run()
    monkeypatch.delenv("FAULTS")
    straight = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = run()
    assert numbers(found) == numbers(straight)
    is_kept = [line["time"] == old["time"] for line, old in zip(found, straight, strict=True)]
    assert is_kept == [True, True, False, False]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pretrained model."""
    root = tmp_path_factory.mktemp("base")
    run_gpt(root / "log", "--save", str(root / "base"), "--train-iters", "1")
    return root / "base"


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that comes from Hugging Face, and data to tune it with."""
    folder = tmp_path_factory.mktemp("tuned")
    trl_preference.save_tokenizer(folder / "hf")
    trl_preference.tiny_llama().save_pretrained(folder / "hf")
    request = ConversionRequest(
        source=folder / "hf", target=folder / "base", format="safetensors_dist"
    )
    convert(request, say=lambda text: None)
    names = ("prompt", "chosen", "rejected")
    pairs = [dict(zip(names, row, strict=True)) for row in trl_preference.ROWS]
    rows = [{"prompt": pair["prompt"], "completion": pair["chosen"]} for pair in pairs]
    for name, lines in (("pairs", pairs), ("rows", rows)):
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(x)}\n" for x in lines))
    return folder


@pytest.mark.feature("Checkpoints: one command starts from other weights or continues its run")
@pytest.mark.parametrize("name", selection.only(DEFAULT, PRETRAINING))
def test_a_killed_run_from_a_pretrained_model_continues(
    base: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = [word.replace("BASE", str(base)) for word in PRETRAINING[name].split()]
    flags += ["--load", str(base), "--save", str(tmp_path / "save"), *STEPS]
    check_that_it_continues(lambda: run_gpt(tmp_path, *flags, base=TINY), tmp_path, monkeypatch)


@pytest.mark.parametrize(
    "name", selection.only(["conversations, after --finetune", "DPO"], FINE_TUNING)
)
def test_a_killed_fine_tuning_run_continues(
    tuned: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = [word.replace("FOLDER", str(tuned)) for word in FINE_TUNING[name].split()]
    flags += ["--load", str(tuned / "base"), "--tokenizer-model", str(tuned / "hf")]
    flags += ["--save", str(tmp_path / "save"), "--data-cache-path", str(tmp_path), *STEPS]
    check_that_it_continues(lambda: run_gpt(tmp_path, *flags, base=TUNING), tmp_path, monkeypatch)


def test_a_killed_reinforcement_learning_run_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = str(tmp_path / "policy")
    run_rl(tmp_path / "first", "--train-iters", "1", "--save", policy)
    flags = ["--load", policy, "--finetune", "--pretrained-checkpoint", policy, *STEPS]
    flags += ["--grpo-kl-beta", "0.5", "--save", str(tmp_path / "save")]
    check_that_it_continues(lambda: run_rl(tmp_path, *flags), tmp_path, monkeypatch)
