"""Parallel layers on two ranks against one plain matrix, forward and every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.config.errors import ConfigError, DataError
from megatron.core.params.param_info import info_of
from megatron.core.params.param_init import Init
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.data import broadcast_data
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from megatron.core.tensor_parallel.random import checkpoint, fork_if, model_parallel_seed
from tests.support import tolerances
from tests.support.one_process import tiny_config
from tests.support.ranks import run_ranks

TIGHT = tolerances.of(torch.float64)


def config(sequence_parallel: bool) -> Any:
    return tiny_config(params_dtype=torch.float64, sequence_parallel=sequence_parallel)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def column_then_row(rank: int, world_size: int, sequence_parallel: bool) -> None:
    group = dist.group.WORLD
    assert group is not None
    common: Any = {
        "config": config(sequence_parallel),
        "init_method": Init("normal", 0.1),
        "tp_group": group,
    }
    column, row = ColumnParallelLinear(6, 8, **common), RowParallelLinear(8, 6, **common)
    first, second = nn.Linear(6, 8).double(), nn.Linear(8, 6).double()
    with torch.no_grad():
        for i, p in enumerate((*first.parameters(), *second.parameters())):
            p.copy_(draw(*p.shape, seed=i))
        column.weight.copy_(first.weight.chunk(2)[rank])
        column.bias.copy_(first.bias.chunk(2)[rank])
        row.weight.copy_(second.weight.chunk(2, 1)[rank])
        row.bias.copy_(second.bias)
    x_all, scale = draw(4, 3, 6, seed=9).requires_grad_(), draw(4, 3, 6, seed=10)
    (second(first(x_all)) * scale).sum().backward()

    cut = slice(2 * rank, 2 * rank + 2) if sequence_parallel else slice(None)
    x = x_all.detach()[cut].clone().requires_grad_()
    inner, bias = column(x)
    assert bias is None
    y, bias = row(inner)
    assert bias is None
    (y * scale[cut]).sum().backward()
    torch.testing.assert_close(y, second(first(x_all))[cut], **TIGHT)
    torch.testing.assert_close(x.grad, x_all.grad[cut], **TIGHT)
    torch.testing.assert_close(column.weight.grad, first.weight.grad.chunk(2)[rank], **TIGHT)
    torch.testing.assert_close(column.bias.grad, first.bias.grad.chunk(2)[rank], **TIGHT)
    torch.testing.assert_close(row.weight.grad, second.weight.grad.chunk(2, 1)[rank], **TIGHT)
    bias_grad = row.bias.grad
    if sequence_parallel:
        dist.all_reduce(bias_grad)
    torch.testing.assert_close(bias_grad, second.bias.grad, **TIGHT)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_column_and_a_row_layer_are_two_plain_ones(sequence_parallel: bool) -> None:
    run_ranks(column_then_row, 2, sequence_parallel)


def odd_uses(rank: int, world_size: int) -> None:
    group = dist.group.WORLD
    common: Any = {"config": config(False), "init_method": Init("normal", 0.1), "tp_group": group}
    weight, bias, x = draw(8, 6), draw(8, seed=1), draw(2, 3, 6, seed=2)
    gathering = ColumnParallelLinear(
        6, 8, gather_output=True, skip_bias_add=True, skip_weight_param_allocation=True, **common
    )
    with torch.no_grad():
        gathering.bias.copy_(bias.chunk(2)[rank])
    y, own_bias = gathering(x, weight.chunk(2)[rank])
    torch.testing.assert_close(y, x @ weight.t(), **TIGHT)
    assert own_bias is gathering.bias

    row = RowParallelLinear(6, 8, input_is_parallel=False, skip_bias_add=True, **common)
    with torch.no_grad():
        row.weight.copy_(weight.chunk(2, 1)[rank])
    row.weight.requires_grad_(False)
    x.requires_grad_()
    y, own_bias = row(x)
    assert own_bias is row.bias
    torch.testing.assert_close(y, x @ weight.t(), **TIGHT)
    y.sum().backward()
    assert row.weight.grad is None
    torch.testing.assert_close(x.grad, weight.sum(0).expand(2, 3, 6), **TIGHT)

    frozen = ColumnParallelLinear(6, 8, **common)
    with torch.no_grad():
        frozen.weight.copy_(weight.chunk(2)[rank])
        frozen.bias.copy_(bias.chunk(2)[rank])
    frozen.requires_grad_(False)
    x.grad = None
    frozen(x)[0].sum().backward()
    assert frozen.weight.grad is None
    torch.testing.assert_close(x.grad, weight.sum(0).expand(2, 3, 6), **TIGHT)
    unreduced = ColumnParallelLinear(
        6, 8, disable_grad_reduce=True, tp_comm_buffer_name="fc1", stride=2, **common
    )
    assert info_of(unreduced.weight).blocks == (1, 1)
    with torch.no_grad():
        unreduced.weight.copy_(weight.chunk(2)[rank])
    x.grad = None
    unreduced(x)[0].sum().backward()
    torch.testing.assert_close(x.grad, weight.chunk(2)[rank].sum(0).expand(2, 3, 6), **TIGHT)
    with pytest.raises(ConfigError, match="7 is not a multiple of --tensor-model-parallel-size 2"):
        ColumnParallelLinear(6, 7, **common)


def test_gathered_outputs_whole_inputs_and_frozen_weights() -> None:
    run_ranks(odd_uses, 2)


def embedding(rank: int, world_size: int) -> None:
    group = dist.group.WORLD
    table, ids = draw(7, 4), torch.tensor([[0, 6, 3], [4, 5, 2]])
    for cut in (False, True):
        layer = VocabParallelEmbedding(
            12,
            4,
            config=config(False),
            init_method=Init("normal", 0.1),
            tp_group=group,
            num_tokens=7,
            reduce_scatter_embeddings=cut,
        )
        padded = torch.cat([table, torch.zeros(5, 4)])
        with torch.no_grad():
            layer.weight.copy_(padded.chunk(2)[rank])
        plain = padded.clone().requires_grad_()
        use = ids[:, :2]
        expected, scale = F.embedding(use, plain), draw(2, 2, 4, seed=3)
        (expected * scale).sum().backward()
        y = layer(use)
        if cut:
            expected, scale = expected.transpose(0, 1)[[rank]], scale.transpose(0, 1)[[rank]]
        torch.testing.assert_close(y, expected, **TIGHT)
        (y * scale).sum().backward()
        torch.testing.assert_close(layer.weight.grad, plain.grad.chunk(2)[rank], **TIGHT)
        for bad in (7, 11, -1):
            with pytest.raises(DataError, match="do not fit a vocabulary of 7"):
                layer(torch.tensor([[0, bad]]))


def test_an_embedding_cut_over_ranks_is_the_whole_one() -> None:
    run_ranks(embedding, 2)


def cross_entropy(rank: int, world_size: int) -> None:
    group = dist.group.WORLD
    logits, target = 5 * draw(4, 3, 12), torch.tensor([[0, 6, 3]] * 4)
    for smoothing in (0.0, 0.1):
        for vocab_size in (12, 7, 5):
            mine = logits.chunk(2, -1)[rank].clone().requires_grad_()
            plain = logits[..., :vocab_size].clone().requires_grad_()
            use = target.clamp_max(vocab_size - 1)
            over_all = smoothing * vocab_size / (vocab_size - 1)  # torch counts the target, too
            expected = F.cross_entropy(
                plain.flatten(0, 1), use.flatten(), reduction="none", label_smoothing=over_all
            ).view(4, 3)
            loss = vocab_parallel_cross_entropy(
                mine, use, smoothing, tp_group=group, vocab_size=vocab_size
            )
            torch.testing.assert_close(loss, expected, **TIGHT)
            scale = draw(4, 3, seed=5)
            (loss * scale).sum().backward()
            (expected * scale).sum().backward()
            grad = torch.cat([plain.grad, torch.zeros(4, 3, 12 - vocab_size)], -1)
            torch.testing.assert_close(mine.grad, grad.chunk(2, -1)[rank], **TIGHT)

    for wrong in (target[:2], target.float()):
        with pytest.raises(DataError, match=r"do not fit logits \[4, 3, 6\]"):
            vocab_parallel_cross_entropy(mine, wrong, tp_group=group)


def test_the_loss_over_a_divided_vocabulary_is_torchs() -> None:
    run_ranks(cross_entropy, 2)


def dropout(rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    model_parallel_seed(3, tp_rank=rank)
    alike = F.dropout(torch.ones(64), 0.5)
    with fork_if(True):
        own = F.dropout(torch.ones(64), 0.5)
    return alike, own


def test_dropout_is_alike_in_replicated_regions_and_apart_in_cut_ones() -> None:
    (alike0, own0), (alike1, own1) = run_ranks(dropout, 2)
    assert torch.equal(alike0, alike1)
    assert not torch.equal(own0, own1)


def reading(rank: int, world_size: int) -> Any:
    group = dist.group.WORLD
    assert group is not None
    batch = {"a": torch.arange(6).view(2, 3), "b": torch.arange(4)} if rank == 0 else None
    return broadcast_data(["b", "a"], batch, torch.int64, tp_group=group)


def test_one_rank_reads_and_all_have_the_batch() -> None:
    for batch in run_ranks(reading, 2):
        assert torch.equal(batch["a"], torch.arange(6).view(2, 3))
        assert torch.equal(batch["b"], torch.arange(4))


def shared_memory(rank: int, world_size: int) -> None:
    group = dist.group.WORLD
    x, weight = draw(4, 2, 6).requires_grad_(), draw(6, 6, seed=1).requires_grad_()
    expected = torch.tanh(x @ weight)
    expected.square().sum().backward()
    grads, x.grad, weight.grad = (x.grad, weight.grad), None, None
    out = checkpoint(lambda y: torch.tanh(y @ weight), True, x, tp_group=group)
    saved = out.grad_fn.saved_tensors[0]
    assert saved.numel() == x.numel() // 2
    assert saved.untyped_storage().nbytes() == x.untyped_storage().nbytes() // 2
    out.square().sum().backward()
    assert torch.equal(x.grad, grads[0])
    assert torch.equal(weight.grad, grads[1])


def test_a_shared_checkpoint_keeps_half_of_its_input_and_the_same_gradients() -> None:
    run_ranks(shared_memory, 2)
