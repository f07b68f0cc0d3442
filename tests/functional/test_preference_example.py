"""examples/post_training/dpo.sh goes from Hugging Face to Hugging Face."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.golden import trl_preference
from tests.support import forked, selection
from tests.support.runs import ROOT, losses

transformers = pytest.importorskip("transformers")
pytest.importorskip("tokenizers")


@pytest.mark.feature(
    "DPO and reward models: one script from Hugging Face and back (examples/post_training/dpo.sh)"
)
@pytest.mark.parametrize("is_reward", selection.only([False], [False, True]))
def test_the_example_learns_which_answers_are_chosen(tmp_path: Path, is_reward: bool) -> None:
    model = tmp_path / "model"
    trl_preference.save_tokenizer(model)
    trl_preference.tiny_llama().save_pretrained(model)
    names = "prompt", "chosen", "rejected"
    rows = [dict(zip(names, row, strict=True)) for row in trl_preference.ROWS * 8]
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "PYTHON": forked.python(),
        "TRAIN_ITERS": "6",
        "SEQ_LENGTH": "64",
        "BATCH": "4",
        "LR": "1e-2",
        "REWARD": str(int(is_reward)),
        "PRECISION": "fp32" if is_reward else "bf16",
    }
    out = tmp_path / "out"
    ended = subprocess.run(
        ["bash", "examples/post_training/dpo.sh", str(model), str(pairs), str(out)],
        cwd=ROOT,
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    steps = [json.loads(line) for line in (out / "metrics.jsonl").open()]
    found = losses(steps, "reward loss" if is_reward else "dpo loss")
    assert found[-1] < 0.5 * found[0]
    assert losses(steps, "reward accuracy")[-1] == 1
    (architecture,) = json.loads((out / "hf" / "config.json").read_text())["architectures"]
    wanted = "LlamaForSequenceClassification" if is_reward else "LlamaForCausalLM"
    assert architecture == wanted
    getattr(transformers, wanted).from_pretrained(out / "hf")
