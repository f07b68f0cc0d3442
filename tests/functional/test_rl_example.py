"""examples/post_training/grpo.sh runs, and its environment rewards right expressions."""

from __future__ import annotations

import json
import os
import random
import subprocess
from pathlib import Path

import pytest

from examples.post_training.countdown import Countdown, problems, value_of
from tests.support import forked
from tests.support.runs import ROOT


@pytest.mark.parametrize(
    ("text", "numbers", "value"),
    [
        ("7*3", [3, 7], 21),
        ("2-9", [2, 9], -7),
        ("2+3*4", [2, 3, 4], 14),
        ("2*3-4*5", [2, 3, 4, 5], -14),
        ("7*3", [7, 4], None),
        ("7", [7, 3], None),
        ("7**3", [7, 3], None),
        ("7+3=", [7, 3], None),
        ("", [], None),
    ],
)
def test_an_expression_has_a_value(text: str, numbers: list[int], value: int | None) -> None:
    assert value_of(text, numbers) == value


def test_the_reward_is_that_of_the_right_result() -> None:
    prompt = {"prompt": "7 3 = 21:", "numbers": [7, 3], "result": 21}
    environment = Countdown(count=3)
    assert [environment.reward(prompt, text) for text in (" 7*3", "3*7", "7+3", "21")] == [
        1.0,
        1.0,
        0.1,
        0.0,
    ]
    assert len(environment.prompts) == 3
    assert problems(random.Random(1), 3, 2, 9) == list(environment.prompts)


def run_example(folder: Path, warmup: int, steps: int) -> list[float]:
    """Run the script; return the rewards of its steps."""
    variables = {"PYTHON": forked.python(), "WARMUP_ITERS": str(warmup), "TRAIN_ITERS": str(steps)}
    script = ["bash", "examples/post_training/grpo.sh", str(folder)]
    ended = subprocess.run(
        script, cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert "7 3 = 21:" in ended.stdout
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [step["reward"] for step in map(json.loads, lines) if "reward" in step]


@pytest.mark.feature("RL: an example learns countdown (examples/post_training/grpo.sh)")
def test_the_example_runs(tmp_path: Path) -> None:
    assert len(run_example(tmp_path / "out", 5, 2)) == 2


@pytest.mark.slow
def test_the_example_learns(tmp_path: Path) -> None:
    rewards = run_example(tmp_path / "out", 200, 150)
    assert sum(rewards[:10]) / 10 < 0.3
    assert sum(rewards[-10:]) / 10 > 0.45
