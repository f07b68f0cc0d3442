"""examples/post_training/lora.sh runs: adapters, files of PEFT, a merged model, text."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.support import forked
from tests.support.runs import ROOT, run_gpt


@pytest.mark.feature("LoRA: an example trains adapters and merges them (examples/post_training)")
def test_the_example_runs(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    variables = {"PYTHON": forked.python(), "BASE_ITERS": "5", "TRAIN_ITERS": "3"}
    ended = subprocess.run(
        ["bash", "examples/post_training/lora.sh", str(folder)],
        cwd=ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    written = [line for line in ended.stdout.splitlines() if line.startswith("7 3 = 21:")]
    assert len(written) == 3
    assert written[1] == written[2]  # adapters beside the base, and merged into it
    config = json.loads((folder / "peft" / "adapter_config.json").read_text())
    assert config["r"] == 8
    assert "lm_head" in config["target_modules"]


def test_text_is_generated_without_the_layers_that_predict_ahead(tmp_path: Path) -> None:
    """The base is then loaded in part, so that its hash is another one."""
    ahead = ("--mtp-num-layers", "1", "--position-embedding-type", "rope", "--train-iters", "1")
    base = tmp_path / "base"
    adapters = tmp_path / "adapters"
    run_gpt(tmp_path / "a", *ahead, "--save", str(base))
    lora = ("--load", str(base), "--save", str(adapters), "--lora-rank", "2")
    run_gpt(tmp_path / "b", *ahead, *lora)
    tool = [forked.python(), "tools/text_generation_cli.py", "--load", str(adapters)]
    ended = subprocess.run(
        [*tool, "--num-tokens", "2", "--temperature", "0", "--prompt", "1 2 3"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert ended.stdout.splitlines()[-1].startswith("1 2 3 ")
