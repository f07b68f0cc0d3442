"""Functions of megatron.core.tensor_parallel that scripts call without a group."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core import mpu, tensor_parallel
from tests.support import tolerances
from tests.support.ranks import run_ranks

TIGHT = tolerances.of(torch.float64)


def _draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def _regions(rank: int, world_size: int) -> None:
    mpu.initialize_model_parallel(tensor_model_parallel_size=world_size)
    whole = _draw(4, 6)
    mine, my_rows = whole.chunk(2, 1)[rank], whole.chunk(2)[rank]
    tp = tensor_parallel
    same = torch.testing.assert_close
    same(tp.scatter_to_tensor_model_parallel_region(whole), mine, **tolerances.BITWISE)
    same(tp.gather_from_tensor_model_parallel_region(mine), whole, **tolerances.BITWISE)
    same(tp.scatter_to_sequence_parallel_region(whole), my_rows, **tolerances.BITWISE)
    same(tp.gather_from_sequence_parallel_region(my_rows), whole, **tolerances.BITWISE)
    same(tp.reduce_from_tensor_model_parallel_region(whole), 2 * whole, **TIGHT)
    same(tp.reduce_scatter_to_sequence_parallel_region(whole), 2 * my_rows, **TIGHT)
    x = whole.clone().requires_grad_()
    tp.copy_to_tensor_model_parallel_region(x).sum().backward()
    same(x.grad, torch.full_like(whole, 2), **TIGHT)
    group = mpu.get_tensor_model_parallel_group()
    same(tp.gather_from_tensor_model_parallel_region(mine, group), whole, **tolerances.BITWISE)


def test_regions_of_the_installed_group():
    run_ranks(_regions, 2)


def _loss_and_batch(rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    mpu.initialize_model_parallel(tensor_model_parallel_size=world_size)
    batch = {"tokens": torch.arange(3)} if rank == 0 else None
    received = tensor_parallel.broadcast_data(["tokens"], batch, torch.int64)["tokens"]
    logits = _draw(3, 8).chunk(world_size, -1)[rank]
    return tensor_parallel.vocab_parallel_cross_entropy(logits, received), received


def test_a_batch_and_its_loss_over_a_divided_vocabulary():
    expected = torch.nn.functional.cross_entropy(_draw(3, 8), torch.arange(3), reduction="none")
    for loss, received in run_ranks(_loss_and_batch, 2):
        torch.testing.assert_close(loss.double(), expected, **tolerances.of(torch.float32))
        assert received.tolist() == [0, 1, 2]
