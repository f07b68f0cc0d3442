"""Every launch script in examples/ gives a command line that the parser takes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from megatron.core.config.errors import ConfigError
from megatron.training.arguments.parser import build_parser
from megatron.training.arguments.resolve import resolve

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(ROOT.glob("examples/*/*.sh"))

# Stands in for torchrun: writes the words it was given, a line each.
RECORDER = '#!/bin/bash\nprintf "%s\\n" "$@" >"$RECORD"\n'


def words_of(script: Path, tmp_path: Path, **environment: str) -> list[str]:
    """The words behind pretrain_*.py when the script runs."""
    recorder = tmp_path / "torchrun"
    recorder.write_text(RECORDER)
    recorder.chmod(0o755)
    record = tmp_path / "words"
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, **environment, "PATH": path, "RECORD": str(record)}
    subprocess.run(["bash", str(script)], check=True, env=env, cwd=ROOT)
    words = record.read_text().splitlines()
    entry = next(i for i, word in enumerate(words) if word.startswith("pretrain_"))
    assert (ROOT / words[entry]).exists(), f"{script.name} runs {words[entry]}, which is not there"
    return words[entry + 1 :]


def parse(words: list[str]):
    parser = build_parser()
    parsed, unknown = parser.parse_known_args(words)
    assert parser.problems + unknown == []
    return parsed


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_the_script_starts_or_is_refused_only_for_what_this_version_lacks(script, tmp_path):
    world_size = 128 if "175b" in script.name else 8
    problems = ""
    try:
        resolve(parse(words_of(script, tmp_path)), world_size)
    except ConfigError as error:
        problems = str(error)
    assert all("not in this version" in line for line in problems.splitlines()[1:]), problems


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_the_script_parses(script, tmp_path):
    parsed = parse(words_of(script, tmp_path))
    assert None not in (parsed.num_layers, parsed.save, parsed.micro_batch_size)


def test_the_fp8_form_of_llama3_parses(tmp_path):
    script = ROOT / "examples/llama/train_llama3_8b_h100.sh"
    parsed = parse(words_of(script, tmp_path, FP8="1", TP_SIZE="2"))
    assert parsed.fp8 == "hybrid"
    assert parsed.sequence_parallel
