"""The real command line with sequences divided over ranks: the losses of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests import tolerances
from tests.functional.runs import losses, run_gpt

FLAGS = (
    "--group-query-attention --num-query-groups 2 --position-embedding-type rope "
    "--eval-interval 3"
).split()


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    return run_gpt(tmp_path_factory.mktemp("one"), *FLAGS)


@pytest.mark.feature("Layouts: GPT trains to the same losses under context parallelism")
@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (2, "--context-parallel-size 2"),
        (2, "--context-parallel-size 2 --cp-comm-type a2a allgather"),
        (4, "--context-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel"),
        (
            4,
            "--context-parallel-size 4 --cp-comm-type a2a+p2p p2p "
            "--hierarchical-context-parallel-sizes 2 2",
        ),
    ],
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
