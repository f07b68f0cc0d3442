"""Fixtures of this directory."""

import pytest
import torch

from tests.support.one_rank_training import alone as alone


@pytest.fixture(scope="session", autouse=True)
def _torch_optim_is_loaded() -> None:
    """Its first optimizer imports the compiler, which sets an environment variable."""
    torch.optim.SGD([torch.zeros(1, requires_grad=True)])
