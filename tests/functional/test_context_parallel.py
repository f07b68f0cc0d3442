"""The real command line with sequences divided over ranks: the losses of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support import selection, tolerances
from tests.support.runs import losses, run_gpt

FLAGS = (
    "--group-query-attention --num-query-groups 2 --position-embedding-type rope --eval-interval 3"
).split()


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    return run_gpt(tmp_path_factory.mktemp("one"), *FLAGS)


@pytest.mark.feature("Layouts: GPT trains to the same losses under context parallelism")
@pytest.mark.parametrize(
    ("ranks", "layout"),
    selection.first(
        2,
        [
            (2, "--context-parallel-size 2 --cp-comm-type a2a allgather"),
            (
                4,
                "--context-parallel-size 4 --cp-comm-type a2a+p2p p2p "
                "--hierarchical-context-parallel-sizes 2 2",
            ),
            (2, "--context-parallel-size 2"),
            (4, "--context-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel"),
        ],
    ),
)
def test_ranks_that_share_sequences_print_the_losses_of_one_process(
    tmp_path: Path, one_process: list[dict[str, float]], ranks: int, layout: str
) -> None:
    found = run_gpt(tmp_path, *FLAGS, *layout.split(), world_size=ranks)
    for key in ("lm loss", "grad-norm", "lm loss validation", "lm loss test"):
        assert losses(one_process, key)
        torch.testing.assert_close(
            torch.tensor(losses(found, key)),
            torch.tensor(losses(one_process, key)),
            **tolerances.LAYOUT_LOSS,
        )


@pytest.mark.feature("Context parallelism: a checkpoint is continued on any number of such ranks")
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_a_checkpoint_goes_on_with_other_shares(
    tmp_path: Path, one_process: list[dict[str, float]], before: int, after: int
) -> None:
    folder = str(tmp_path / "checkpoint")
    runs = (
        (before, ["--exit-interval", "3", "--save", folder, "--save-interval", "100"]),
        (after, ["--load", folder]),
    )
    found: list[float] = []
    for number, (size, flags) in enumerate(runs):
        layout = ["--context-parallel-size", str(size)]
        lines = run_gpt(tmp_path / str(number), *FLAGS, *layout, *flags, world_size=size)
        found += losses(lines)
    torch.testing.assert_close(
        torch.tensor(found), torch.tensor(losses(one_process)), **tolerances.LAYOUT_LOSS
    )


def test_a_resumed_run_with_dropout_is_the_uninterrupted_one(tmp_path: Path) -> None:
    flags = "--context-parallel-size 2 --hidden-dropout 0.1 --attention-dropout 0.1".split()
    folder = str(tmp_path / "checkpoint")
    whole = run_gpt(tmp_path / "whole", *flags, world_size=2)
    first = run_gpt(
        tmp_path / "first", *flags, "--exit-interval", "3", "--save", folder, world_size=2
    )
    rest = run_gpt(tmp_path / "rest", *flags, "--load", folder, world_size=2)
    assert losses(first) + losses(rest) == losses(whole)
