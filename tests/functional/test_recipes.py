"""Every recipe of examples/recipes trains by the flags that its comment has for a laptop."""

from __future__ import annotations

import json
import math
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from megatron.training.arguments.parser import parse_args
from megatron.training.arguments.programs import path_of
from megatron.training.fault_tolerance.launch_flags import parse
from megatron_commands import command_line
from tests.repo.source import ROOT
from tests.support import forked
from tests.support.pages import blocks_of, commands_of
from tools import launch

for package in ("PIL", "jinja2", "safetensors", "tokenizers", "transformers", "yaml"):
    pytest.importorskip(package)

RECIPES = {path.stem: path for path in (ROOT / "examples/recipes").glob("*.yaml")}
PAGE = ROOT / "docs/recipes.md"
LAPTOP = re.compile(r"^# On a laptop: (.*\n(?:#   .*\n)*)", re.MULTILINE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `megatron-train recipes FOLDER` writes."""
    found = tmp_path_factory.mktemp("recipes") / "new"
    copy = [forked.python(), str(path_of("examples/recipes/copy_recipes.py")), str(found)]
    done = subprocess.run(copy, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"cd {found}; megatron-train --config sft-lora.yaml --load tiny" in done.stdout
    return found


@pytest.fixture(autouse=True)
def _inside(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def run(config: str, *flags: str) -> list[dict[str, float]]:
    """Run ``megatron-train --config``; return the metrics of the steps."""
    Path("metrics.jsonl").unlink(missing_ok=True)
    words = command_line(["--config", config, *flags, "--metrics-file", "metrics.jsonl"])
    done = subprocess.run([forked.python(), *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-2000:]
    assert f"> {config}: --" in done.stdout
    lines = map(json.loads, Path("metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == "step"]


@pytest.mark.feature("Recipes: twelve files for one GPU; the flags of their comments fit a laptop")
@pytest.mark.parametrize("name", sorted(RECIPES))
def test_a_recipe_trains(name: str) -> None:
    text = RECIPES[name].read_text()
    lines = text.splitlines()
    assert len(lines) <= 27
    assert max(map(len, lines)) <= 100
    found = LAPTOP.search(text)
    assert found is not None
    flags = shlex.split(found[1].replace("\n#", ""))
    assert ["megatron-train", "--config", f"{name}.yaml", *flags] in commands_of(PAGE)
    config = parse_args(argv=["--config", f"{name}.yaml"])
    assert config.load is not None, "else the same command would begin again"
    has_default = re.search(r"^train: (sft|dpo)\b", text, re.MULTILINE)  # it starts from a folder
    assert has_default or config.save_interval is not None, "else a crash would lose everything"
    steps = run(f"{name}.yaml", *flags)
    assert len(steps) >= 2
    assert all(math.isfinite(step["grad-norm"]) for step in steps)
    assert Path(f"runs/{name}/latest_checkpointed_iteration.txt").exists()
    if "save-hf" in text:
        written = {path.name for path in Path(f"runs/{name}-hf").iterdir()}
        assert ("adapter_config.json" if "lora" in text else "config.json") in written
    if name == "sft":
        check_repeated(steps)


def check_repeated(steps: list[dict[str, float]]) -> None:
    """Run again by the file beside the checkpoint; compare."""
    (file,) = Path("runs/sft").glob("iter_*/config.yaml")
    again = run(str(file), "--save", "again", "--save-hf", "again-hf")
    names = ("lm loss", "grad-norm", "learning-rate")
    assert [[step[n] for n in names] for step in again] == [
        [step[n] for n in names] for step in steps
    ]


def test_the_other_lines_of_the_page_name_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    (example,) = [block.code for block in blocks_of(PAGE) if block.language == "yaml"]
    Path("example.yaml").write_text(example)
    monkeypatch.setenv("MODELS", "/models")
    args = parse_args(argv=["--config", "example.yaml", "--lr", "2"])
    assert (args.sft, args.load, args.lr) == (True, "/models/Qwen3-0.6B", 2)
    lines = [words for words in commands_of(PAGE) if "--config" in words]
    assert len(lines) == len(RECIPES) + 4 == 16
    for command, *words in lines:
        if command == "megatron-train":
            file, *flags = command_line(words)
            assert (ROOT / file).is_file()
            assert parse_args(argv=flags).yaml_cfg.endswith(".yaml")
        elif command == "megatron-launch":
            script = parse(launch.named(words)).script
            assert script[-4:-1] == (str(path_of("pretrain_gpt.py")), "--config", "sft.yaml")
        else:
            assert command == "torchrun"
