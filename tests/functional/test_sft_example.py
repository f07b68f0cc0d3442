"""examples/post_training/sft.sh goes from Hugging Face to Hugging Face."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.golden.make_sft_losses import TEMPLATE, write_model
from tests.support import forked
from tests.support.chat_templates import write_conversations
from tests.support.runs import ROOT, losses

transformers = pytest.importorskip("transformers")
pytest.importorskip("jinja2")


@pytest.mark.feature(
    "Fine-tuning: from Hugging Face and back with one script (examples/post_training/sft.sh)"
)
def test_the_example_tunes_a_model_of_hugging_face(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    write_model(model)
    published = transformers.AutoModelForCausalLM.from_pretrained(model).bfloat16()
    published.save_pretrained(model)  # as most models are
    chats = write_conversations(tmp_path / "chats.jsonl", 60)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": [{"role": "user", "content": "Who?"}]}))
    settings = {
        "PYTHON": forked.python(),
        "TRAIN_ITERS": "4",
        "SEQ_LENGTH": "128",
        "BATCH": "4",
        "LR": "1e-2",
        "EVAL_PROMPTS": str(prompts),
    }
    out = tmp_path / "out"
    first, ended = (
        subprocess.run(
            ["bash", "examples/post_training/sft.sh", str(model), str(chats), str(out)],
            cwd=ROOT,
            env={**os.environ, **settings, **more},
            capture_output=True,
            text=True,
        )
        for more in ({"FAULTS": "save.after_rename:kill:step2"}, {})
    )
    assert first.returncode != 0
    assert f"continuing the run in --save {out}/tuned" in ended.stdout
    assert "at iteration 2" in ended.stdout
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert "first training sample" in ended.stdout
    assert "prompt 1 of 1 at iteration 4: Who?" in ended.stdout
    found = losses([json.loads(line) for line in (out / "metrics.jsonl").open()])
    assert found[-1] < found[0]
    tuned = transformers.AutoModelForCausalLM.from_pretrained(out / "hf")
    before = transformers.AutoModelForCausalLM.from_pretrained(model)
    name = "model.layers.0.mlp.up_proj.weight"
    assert not tuned.get_parameter(name).equal(before.get_parameter(name))
    assert json.loads((out / "hf" / "config.json").read_text())["dtype"] == "bfloat16"
    assert transformers.AutoTokenizer.from_pretrained(out / "hf").chat_template == TEMPLATE
