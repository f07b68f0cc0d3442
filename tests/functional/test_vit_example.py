"""examples/vision/train_vit_base_distributed.sh trains on folders of images, and resumes."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.functional.test_vision_classify import draw
from tests.support import forked
from tests.support.runs import ROOT
from tests.support.supervised import free_port

LOSS = re.compile(r"iteration +(\d)/ +4 .* loss: (\S+)")
# The size of the model and of the run, for a test.
SMALL = (
    "--device cpu --num-layers 2 --hidden-size 32 --num-attention-heads 4 --img-h 12 --img-w 12 "
    "--patch-dim 4 --micro-batch-size 4 --global-batch-size 8 --train-iters 4 --lr-warmup-iters 0 "
    "--log-interval 1 --eval-iters 1 --num-workers 0"
).split()


def train(folder: Path, gpus: int, *flags: str) -> dict[int, float]:
    """Run the script; return the losses by iteration."""
    images = str(folder / "images")
    given = [str(folder / "checkpoints"), str(folder / "tensorboard"), images, images]
    variables = {
        "PATH": f"{Path(forked.python()).parent}{os.pathsep}{os.environ['PATH']}",
        "GPUS_PER_NODE": str(gpus),
        "MASTER_PORT": str(free_port()),
        "NUM_CLASSES": "3",
        "OMP_NUM_THREADS": "1",
    }
    script = ["bash", "examples/vision/train_vit_base_distributed.sh", *given, *SMALL, *flags]
    ended = subprocess.run(
        script, cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
    return {int(step): float(loss) for step, loss in LOSS.findall(ended.stdout)}


@pytest.mark.feature("Examples: examples/vision trains a ViT on folders of images, and resumes")
def test_the_example_trains_and_resumes_on_another_number_of_ranks(tmp_path: Path) -> None:
    draw(tmp_path / "images", images=9)
    first = train(tmp_path, 2, "--exit-interval", "2")
    assert list(first) == [1, 2]
    second = train(tmp_path, 1)
    assert list(second) == [3, 4]
    assert (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").read_text() == "4"
