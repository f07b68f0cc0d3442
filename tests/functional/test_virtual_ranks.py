"""--virtual-ranks: the real command line with all ranks in one process."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.functional.runs import TINY, losses, refusal, run_gpt, train_gpt
from tests.ranks import run_ranks

FLAGS = ["--hidden-dropout", "0.1", "--attention-dropout", "0.1", "--train-iters", "4"]
LAYOUTS = {
    "cp2-tp2": "--context-parallel-size 2 --tensor-model-parallel-size 2",
    "tp2-sp-dp2": "--tensor-model-parallel-size 2 --sequence-parallel --overlap-grad-reduce",
}


def train_in_virtual_ranks(rank: int, world_size: int, argv: list[str]) -> str:
    dist.destroy_process_group()  # as where no launcher is
    with contextlib.redirect_stdout(io.StringIO()) as said:
        train_gpt(0, 1, argv)
    return said.getvalue()


def run_virtual(folder: Path, *flags: str, ranks: int = 4) -> tuple[list[dict[str, Any]], str]:
    metrics = folder / "metrics.jsonl"
    argv = [*TINY, "--metrics-file", str(metrics), "--virtual-ranks", str(ranks), *flags]
    (said,) = run_ranks(train_in_virtual_ranks, 1, argv)
    return [json.loads(line) for line in metrics.read_text().splitlines()], said


@pytest.mark.parametrize("layout", LAYOUTS)
def test_virtual_ranks_print_the_losses_of_real_ones(tmp_path: Path, layout: str) -> None:
    flags = [*FLAGS, *LAYOUTS[layout].split()]
    save = ["--save", str(tmp_path / "checkpoints"), "--save-interval", "2"]
    real = run_gpt(tmp_path / "real", *flags, world_size=4)
    virtual, said = run_virtual(tmp_path, *flags, *save)
    for key in ("lm loss", "grad norm"):
        assert losses(virtual, key) == losses(real, key), key
    assert said.count("iteration        4/       4") == 1, "one rank prints"
    again = ["--load", str(tmp_path / "checkpoints"), "--ckpt-step", "2"]
    resumed = run_gpt(tmp_path / "resumed", *flags, *again, world_size=4)
    assert losses(resumed) == losses(real)[2:]


@pytest.mark.parametrize(
    ("world_size", "flags", "sentence"),
    [
        (2, "--virtual-ranks 4", "--virtual-ranks 4 live in one process, but 2 were started"),
        (1, "--virtual-ranks 2 --device cuda", "--virtual-ranks 2 compute on the CPU"),
        (1, "--virtual-ranks 3 --tensor-model-parallel-size 2", "3 ranks cannot be cut"),
    ],
)
def test_what_cannot_be_is_said(world_size: int, flags: str, sentence: str) -> None:
    assert sentence in run_ranks(refusal, world_size, [*TINY, *flags.split()])[0]
