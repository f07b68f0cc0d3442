"""Functions and layers that projects call without a group, on two ranks."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor, nn

from megatron.core import mpu, tensor_parallel, utils
from megatron.core.pipeline_parallel import p2p_communication
from megatron.core.tensor_parallel import mappings
from tests.support import tolerances
from tests.support.one_process import tiny_config
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


def _uneven_shares(rank: int, world_size: int) -> None:
    """Check an all-to-all with unequal shares."""
    mpu.initialize_model_parallel(tensor_model_parallel_size=world_size)
    same = torch.testing.assert_close
    group = mpu.get_tensor_model_parallel_group()
    sent = [[1, 2], [2, 0]]  # rows from a rank to each rank
    received = [per_rank[rank] for per_rank in sent]
    x = torch.full((sum(sent[rank]), 2), float(rank), requires_grad=True)
    y = mappings.all_to_all(group, x, received, sent[rank])
    same(y[:, 0], torch.cat([torch.full((n,), float(i)) for i, n in enumerate(received)]))
    (y * (rank + 1)).sum().backward()
    to = torch.cat([torch.full((n,), i + 1.0) for i, n in enumerate(sent[rank])])
    same(x.grad, to[:, None].expand_as(x))


def test_shares_may_be_uneven() -> None:
    run_ranks(_uneven_shares, 2)


def _initial_layers(rank: int, world_size: int) -> list[Tensor]:
    """Build layers without groups; return their complete weights."""
    mpu.initialize_model_parallel(tensor_model_parallel_size=world_size)
    torch.manual_seed(5)
    config = tiny_config()
    weights = []
    for init in (utils.init_method_normal(0.3), nn.init.xavier_uniform_):
        column = tensor_parallel.ColumnParallelLinear(4, 6, config=config, init_method=init)
        row = tensor_parallel.RowParallelLinear(4, 6, config=config, init_method=init)
        weights += [column.weight.t(), row.weight]
    gather = tensor_parallel.gather_from_tensor_model_parallel_region
    return [gather(weight.detach().contiguous()) for weight in weights]


def test_initial_weights_of_single_layers_do_not_depend_on_the_layout() -> None:
    (alone,) = run_ranks(_initial_layers, 1)
    for weights in run_ranks(_initial_layers, 2):
        for got, wanted in zip(weights, alone, strict=True):
            torch.testing.assert_close(got, wanted, **tolerances.BITWISE)
    assert len({float(weight.sum()) for weight in alone}) == 4


def _passes_between_stages(rank: int, world_size: int) -> None:
    """Run one forward and one backward pass over two stages by hand; compare with one process."""
    mpu.initialize_model_parallel(pipeline_model_parallel_size=world_size)
    config = SimpleNamespace(
        pipeline_dtype=torch.float64, params_dtype=torch.float32, variable_seq_lengths=rank < 9
    )
    talk = p2p_communication.P2PCommunicator(mpu.get_pipeline_model_parallel_group(), config)
    x, (first, second) = _draw(3, 1, 4).requires_grad_(), (_draw(4, 4), _draw(4, 4) + 1)
    ((x @ first) @ second).square().sum().backward()
    is_last = rank == 1
    received = talk.recv_forward((3, 1, 4), is_first_stage=not is_last)
    own = x.detach().requires_grad_() if received is None else received
    y = own @ (second if is_last else first)
    talk.send_forward(y, is_last_stage=is_last)
    grad = talk.recv_backward((3, 1, 4), is_last_stage=is_last)
    y.backward(2 * y.detach() if grad is None else grad)
    talk.send_backward([own.grad], is_first_stage=not is_last)
    if rank == 0:
        torch.testing.assert_close(own.grad, x.grad, **TIGHT)
    config.variable_seq_lengths = False
    if rank == 0:
        p2p_communication.send_forward([y, None], config)
    else:
        both = p2p_communication.recv_forward([(3, 1, 4), None], config)
        torch.testing.assert_close(both[0], received @ torch.eye(4, dtype=torch.float64), **TIGHT)
        assert both[1] is None


def test_stages_communicate_by_hand() -> None:
    run_ranks(_passes_between_stages, 2)
