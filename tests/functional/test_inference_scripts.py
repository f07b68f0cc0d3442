"""Launch scripts of examples/inference: they serve and generate with small models on CPUs."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support import forked
from tests.support.runs import ROOT, run_gpt
from tests.support.server_process import started

SCRIPTS = ROOT / "examples" / "inference"
PROMPTS = ["1 2 3", "5"]


@pytest.fixture(autouse=True)
def programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the scripts find this environment's python and torchrun."""
    folder = Path(forked.python()).parent
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(ROOT)


def run(script: str, *words: str) -> str:
    """Run a script to its end; return what it wrote."""
    command = ["bash", str(SCRIPTS / script), *words]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def answers(folder: Path, script: str, load: Path, *words: str) -> list[dict[str, Any]]:
    out = folder / "answers.json"
    run(script, str(load), "--device", "cpu", "--output-path", str(out), *words)
    return list(json.loads(out.read_text()).values())


def test_static_and_dynamic_generation_give_the_same_tokens(tmp_path: Path) -> None:
    run_gpt(tmp_path, "--save", str(tmp_path / "ck"))
    words = ["--prompts", *PROMPTS, "--num-tokens-to-generate", "6"]
    words += ["--inference-dynamic-batching-buffer-size-gb", "0.01"]
    static, dynamic = (
        answers(tmp_path, f"gpt/gpt_{kind}_inference_345m.sh", tmp_path / "ck", *words)
        for kind in ("static", "dynamic")
    )
    assert [row["input_prompt"] for row in static] == PROMPTS
    assert [row["generated_text"] for row in static] == [row["generated_text"] for row in dynamic]


@pytest.mark.feature("Examples: a Llama of Hugging Face's form is converted, served and generates")
def test_a_llama_is_converted_served_and_generates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    families = pytest.importorskip("tests.support.generation_families")
    model = families.write_llama(tmp_path / "hf")
    prompt = [40, 413, 79, 12]
    expected, _ = families.greedy(model, prompt)
    load = tmp_path / "ck"
    run("llama/convert_llama3_8b.sh", str(tmp_path / "hf"), str(load), "--dtype", "float32")
    monkeypatch.setenv("PORT", "0")
    script = str(SCRIPTS / "llama" / "run_text_generation_server_llama3_8b.sh")
    with started(["bash", script, str(load), "--device", "cpu"]) as server:
        body = {"prompt": prompt, "max_tokens": len(expected), "temperature": 0, "logprobs": 0}
        status, found = server.ask("POST", "/v1/completions", {**body, "ignore_eos": True})
        assert status == 200, found
        texts = [server.ask("POST", "/detokenize", {"tokens": [t]})[1]["prompt"] for t in expected]
        assert found["choices"][0]["logprobs"]["tokens"] == texts
    (row,) = answers(
        tmp_path, "llama/llama3_8b_static_inference.sh", load, "--prompts", "def main("
    )
    assert 0 < len(row["generated_tokens"]) <= 32
