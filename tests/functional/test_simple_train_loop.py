"""The example that uses the library alone."""

from __future__ import annotations

import pytest
import torch

from examples import run_simple_train_loop
from tests import tolerances
from tests.ranks import run_ranks


def _train(rank: int, world_size: int, tp: int) -> list[float]:
    words = ["--train-iters", "8", "--tensor-model-parallel-size", str(tp)]
    return run_simple_train_loop.main(words)


@pytest.mark.feature("Library: a training loop of one's own from megatron.core alone")
def test_the_loop_learns_and_tensor_parallel_ranks_see_the_same_losses():
    (alone,) = run_ranks(_train, 1, 1)
    cut = run_ranks(_train, 2, 2)
    assert alone[-1] < alone[0] - 1
    torch.testing.assert_close(cut, [alone, alone], **tolerances.LAYOUT_LOSS)
