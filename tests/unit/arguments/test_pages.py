"""Command lines in docs/parallelism.md can start."""

from __future__ import annotations

import re
import shlex

import pytest

from megatron.training.arguments.parser import parse_args
from megatron.training.arguments.resolve import resolve
from tests.repo.source import ROOT

MODEL = (
    "--device cpu --num-layers 8 --hidden-size 64 --num-attention-heads 8 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 16 --lr 1e-3 "
    "--train-iters 3 --mock-data --tokenizer-type NullTokenizer --vocab-size 100 --eval-iters 0 "
    "--log-interval 1 --no-create-attention-mask-in-dataloader --hidden-dropout 0 "
    "--attention-dropout 0"
)


def commands() -> list[str]:
    """The page's command lines, with a model in place of the dots."""
    blocks = "".join(ROOT.joinpath("docs/parallelism.md").read_text().split("```")[1::2])
    joined = blocks.replace("\\\n", " ").splitlines()
    return [line.replace("...", MODEL) for line in joined if "pretrain_gpt.py" in line]


@pytest.mark.parametrize("command", commands())
def test_the_command_can_start(command: str) -> None:
    before, flags = command.split(" pretrain_gpt.py ")
    ranks = re.search(r"(?:-per-node|-ranks|-world-size) (\d+)", before + flags)
    assert ranks, "the page tells how many ranks"
    assert resolve(parse_args(argv=shlex.split(flags)), int(ranks[1])).warnings == ()
