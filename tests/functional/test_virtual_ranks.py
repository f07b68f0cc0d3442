"""--virtual-ranks: the real command line with all ranks in one process."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

from tests.support import selection
from tests.support.ranks import run_ranks
from tests.support.runs import (
    ON_HOST,
    TINY,
    losses,
    refusal,
    run_gpt,
    run_gpt_in_virtual_ranks,
)

FLAGS = ["--hidden-dropout", "0.1", "--attention-dropout", "0.1", "--train-iters", "4"]
LAYOUTS = {
    "tp2-sp-dp2-zero1": "--tensor-model-parallel-size 2 --sequence-parallel "
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    "pp2-vpp-cp2": "--num-layers 4 --pipeline-model-parallel-size 2 --context-parallel-size 2 "
    "--num-layers-per-virtual-pipeline-stage 1",
}


@pytest.mark.parametrize("layout", selection.only(["pp2-vpp-cp2"], LAYOUTS))
def test_virtual_ranks_print_the_losses_of_real_ones(tmp_path: Path, layout: str) -> None:
    flags = [*FLAGS, *LAYOUTS[layout].split()]
    save = ["--save", str(tmp_path / "checkpoints"), "--save-interval", "2"]
    real = run_gpt(tmp_path / "real", *flags, *ON_HOST, world_size=4)
    virtual, said = run_gpt_in_virtual_ranks(tmp_path, *flags, *save)
    for key in ("lm loss", "grad norm"):
        assert losses(virtual, key) == losses(real, key), key
    assert said.count("iteration        4/       4") == 1, "one rank prints"
    again = ["--load", str(tmp_path / "checkpoints"), "--ckpt-step", "2"]
    resumed = run_gpt(tmp_path / "resumed", *flags, *again, *ON_HOST, world_size=4)
    assert losses(resumed) == losses(real)[2:]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--virtual-ranks 2 --device cuda", "--virtual-ranks 2 compute on the CPU"),
        ("--virtual-ranks 3 --tensor-model-parallel-size 2", "3 ranks cannot be divided"),
    ],
)
def test_what_cannot_be_is_said(flags: str, sentence: str) -> None:
    assert sentence in run_ranks(refusal, 1, [*TINY, *flags.split()])[0]


def test_the_straggler_report_of_a_run_has_a_line_per_interval(tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as taken:
        port = str(taken.getsockname()[1])
        flags = ["--log-straggler", "--straggler-ctrlr-port", port, "--train-iters", "2"]
        _, said = run_gpt_in_virtual_ranks(tmp_path, *flags, ranks=2)
    numbers = re.findall(r"MxRtt/Rnk: ([\d.]+)ms/[01] .* MxEtpt/Rnk: ([\d.]+)TF/[01]", said)
    assert len(numbers) == 2
    assert all(float(number) > 0 for pair in numbers for number in pair)
