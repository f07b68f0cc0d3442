"""Rows of several samples of text and images have the losses of the samples one by one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support import selection, tolerances
from tests.support.runs import TINY, losses, run_gpt

BASE = [
    *(flag for flag in TINY if flag != "--mock-data"),
    *(
        "--model-kind vlm --vision-num-layers 1 --seq-length 26 --img-h 12 --img-w 12 "
        "--patch-dim 6 --train-iters 4 --decoder-seq-length 40 "
        "--import-module tests.support.user_packed "
        "--eval-iters 0 --use-packed-sequence --max-position-embeddings 64"
    ).split(),
]
PACKED = "--dataset-type packed --micro-batch-size 2 --global-batch-size 4".split()
APART = "--dataset-type apart --micro-batch-size 4 --global-batch-size 8".split()


@pytest.mark.feature(
    "Vision: packed samples (--use-packed-sequence) have the losses of samples apart"
)
@pytest.mark.parametrize(
    ("ranks", "layout", "positions"),
    selection.first(
        4,
        [
            (2, "--tensor-model-parallel-size 2 --sequence-parallel", "learned_absolute"),
            (2, "--pipeline-model-parallel-size 2", "rope"),
            (2, "--context-parallel-size 2", "rope"),
            (2, "--context-parallel-size 2 --cp-comm-type a2a", "learned_absolute"),
            (1, "", "learned_absolute"),
            (1, "", "rope"),
            (2, "--tensor-model-parallel-size 2 --sequence-parallel", "rope"),
            (2, "--pipeline-model-parallel-size 2", "learned_absolute"),
            (2, "--context-parallel-size 2", "learned_absolute"),
            (2, "--context-parallel-size 2 --cp-comm-type a2a", "rope"),
        ],
    ),
)
def test_packed_samples_have_the_losses_of_samples_apart(
    tmp_path: Path, ranks: int, layout: str, positions: str
) -> None:
    given = [*layout.split(), "--position-embedding-type", positions]
    wanted = losses(run_gpt(tmp_path / "apart", *APART, *given[-2:], base=BASE))
    found = losses(run_gpt(tmp_path / "packed", *PACKED, *given, base=BASE, world_size=ranks))
    assert len(found) == 4
    torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=1e-6, atol=1e-6)


def test_mock_data_are_packed(tmp_path: Path) -> None:
    given = "--mock-data --seq-length 20 --train-iters 3 --use-packed-sequence --model-kind vlm"
    given += " --vision-num-layers 1 --img-h 12 --img-w 12 --patch-dim 6"
    one = losses(run_gpt(tmp_path / "one", *given.split()))
    two = losses(run_gpt(tmp_path / "two", *given.split(), world_size=2))
    torch.testing.assert_close(torch.tensor(two), torch.tensor(one), **tolerances.LAYOUT_LOSS)


def test_samples_are_packed_in_16_bits(tmp_path: Path) -> None:  # on a GPU by bounds, not by a mask
    given = "--bf16 --position-embedding-type rope --attention-backend flash".split()
    wanted = losses(run_gpt(tmp_path / "apart", *APART, *given, base=BASE))
    found = losses(run_gpt(tmp_path / "packed", *PACKED, *given, base=BASE))
    torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=2e-3, atol=0)
