"""examples/post_training/prune.sh and distill.sh run from text to a distilled model."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from megatron.post_training.distillation.logits_store import LogitsStore
from tests.support import forked
from tests.support.runs import ROOT

pytest.importorskip("yaml")
LOSS = re.compile(r"validation loss at.* on validation set \| lm loss value: (\S+)")


def run_example(
    folder: Path, train_iters: int, distill_iters: int, **more: str
) -> dict[str, float]:
    """Run distill.sh, which runs prune.sh; return the last validation loss of each log."""
    variables = {
        "PYTHON": forked.python(),
        "TRAIN_ITERS": str(train_iters),
        "DISTILL_ITERS": str(distill_iters),
        **more,
    }
    script = ["bash", "examples/post_training/distill.sh", str(folder)]
    ended = subprocess.run(
        script, cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
    assert "text of the distilled model" in ended.stdout
    names = ("teacher", "pruned", "distilled", "from-store")
    found = {name: LOSS.findall((folder / f"{name}.log").read_text()) for name in names}
    return {name: float(losses[-1]) for name, losses in found.items()}


@pytest.mark.feature("Pruning and distillation: examples/post_training/{prune,distill}.sh")
def test_the_examples_run(tmp_path: Path) -> None:
    losses = run_example(tmp_path / "out", 4, 2, EVAL_ITERS="1", CALIB_SIZE="4", BATCH="2")
    assert len(losses) == 4
    assert len(LogitsStore(str(tmp_path / "out/store"))) == 4


@pytest.mark.slow
def test_distillation_recovers_what_pruning_lost(tmp_path: Path) -> None:
    losses = run_example(tmp_path / "out", 100, 24)
    lost = losses["pruned"] - losses["teacher"]
    for name in ("distilled", "from-store"):
        assert losses[name] - losses["teacher"] < 0.3 * lost, losses
