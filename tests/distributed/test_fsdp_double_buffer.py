"""--fsdp-double-buffer: fixed addresses, and not a bit of difference."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megatron.core.distributed.fsdp import DoubleBuffers
from tests.support.ranks import run_ranks
from tests.support.runs import TINY, losses, run_gpt, train_gpt

FLAGS = (
    "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params "
    "--num-layers 4 --train-iters 3 --untie-embeddings-and-output-weights"
)
CPU = torch.device("cpu")


def take(buffers: DoubleBuffers, *size: int) -> torch.Tensor:
    return buffers.take(size, dtype=torch.float32, device=CPU)


def test_two_buffers_of_a_size_take_turns() -> None:
    buffers = DoubleBuffers()
    first, second = take(buffers, 8), take(buffers, 2, 4)
    addresses = [first.data_ptr(), second.data_ptr()]
    third = take(buffers, 8)  # both are in use
    assert third.data_ptr() not in addresses
    view = first[2:]
    del first
    assert take(buffers, 8).data_ptr() not in addresses  # a view is a use
    del view, second, third
    found = [take(buffers, 8).data_ptr() for _ in range(4)]
    assert found[:2] == found[2:]
    assert set(found) == set(addresses)
    assert take(buffers, 9).data_ptr() not in addresses


def addresses_of_a_run(rank: int, world_size: int, argv: list[str]) -> dict[str, list[int]]:
    """Addresses that were given, in order, by the buffers and the size that was asked for."""
    given: dict[str, list[int]] = {}
    own = DoubleBuffers.take

    def noted(self: Any, size: Any, **options: Any) -> torch.Tensor:
        tensor = own(self, size, **options)
        given.setdefault(f"{id(self)} {size} {options}", []).append(tensor.data_ptr())
        return tensor

    with mock.patch.object(DoubleBuffers, "take", noted):
        train_gpt(rank, world_size, argv)
    return given


@pytest.mark.feature("Data parallel: FSDP gathers and reduces layers in two fixed buffers")
@pytest.mark.parametrize("more", ["", "--bf16 --num-experts 2"])
def test_layers_take_turns_on_two_buffers(more: str) -> None:
    argv = [*TINY, *FLAGS.split(), *more.split(), "--fsdp-double-buffer"]
    for given in run_ranks(addresses_of_a_run, 2, argv):
        assert given
        for size, addresses in given.items():
            assert len(addresses) >= 3 * 4 * 2, size  # steps, layers, micro-batches
            # A thread of gloo may hold a buffer a little longer; then a third is taken.
            both = Counter(addresses).most_common(2)
            assert sum(count for _, count in both) >= 0.75 * len(addresses), size


def test_not_a_bit_of_the_losses_changes(tmp_path: Path) -> None:
    without = run_gpt(tmp_path / "without", *FLAGS.split(), world_size=2)
    for flag in ("--fsdp-double-buffer", "--use-nccl-ub"):  # the second includes the first
        kept = run_gpt(tmp_path / flag, *FLAGS.split(), flag, world_size=2)
        assert losses(kept) == losses(without)
