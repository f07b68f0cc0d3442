"""The losses of distillation against torch's, on one rank and sharded over the vocabulary."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron.core.tensor_parallel.cross_entropy import kl_divergence
from megatron.post_training.distillation.losses import (
    balance_losses,
    cosine_loss,
    divergence_from_stored,
    find_most_probable,
    mse_loss,
)
from tests.support import tolerances
from tests.support.one_process import one_rank
from tests.support.ranks import run_ranks

SIZE = 37
PADDED = 40
EXACT: dict[str, Any] = {"rtol": 1e-6, "atol": 1e-6}


def draw(*shape: int, seed: int) -> Tensor:
    return 3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def expected(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    q = F.log_softmax(student / temperature, -1)
    p = F.log_softmax(teacher / temperature, -1)
    return F.kl_div(q, p, reduction="none", log_target=True).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_the_divergence_of_logits_is_torchs(temperature: float) -> None:
    student = draw(4, 3, SIZE, seed=0).requires_grad_()
    teacher = draw(4, 3, SIZE, seed=1)
    scale = draw(4, 3, seed=2)
    found = kl_divergence(student, teacher, temperature, tp_group=one_rank())
    (gradient,) = torch.autograd.grad((found * scale).sum(), student)
    wanted = expected(student, teacher, temperature)
    (wanted_gradient,) = torch.autograd.grad((wanted * scale).sum(), student)
    torch.testing.assert_close(found, wanted, **EXACT)
    torch.testing.assert_close(gradient, wanted_gradient, **EXACT)


def sharded(rank: int, world_size: int, temperature: float) -> tuple[Tensor, Tensor]:
    group = dist.group.WORLD
    assert group is not None
    both = [F.pad(draw(4, 3, SIZE, seed=seed), (0, PADDED - SIZE), value=5.0) for seed in (0, 1)]
    student, teacher = (x.chunk(world_size, -1)[rank].contiguous() for x in both)
    student.requires_grad_()
    loss = kl_divergence(student, teacher, temperature, tp_group=group, vocab_size=SIZE)
    (gradient,) = torch.autograd.grad((loss * draw(4, 3, seed=2)).sum(), student)
    return loss.detach(), gradient


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_sharded_vocabulary_with_padding_gives_the_same(world_size: int) -> None:
    student = draw(4, 3, SIZE, seed=0).requires_grad_()
    teacher = draw(4, 3, SIZE, seed=1)
    wanted = expected(student, teacher, 2.0)
    (gradient,) = torch.autograd.grad((wanted * draw(4, 3, seed=2)).sum(), student)
    parts = run_ranks(sharded, world_size, 2.0)
    for loss, _ in parts:
        torch.testing.assert_close(loss, wanted.detach(), **EXACT)
    found = torch.cat([part for _, part in parts], -1)
    torch.testing.assert_close(found[..., :SIZE], gradient, **EXACT)
    assert not found[..., SIZE:].any()


def test_16_bit_logits_are_compared_in_float32() -> None:
    student, teacher = (draw(5, SIZE, seed=seed).bfloat16() for seed in (0, 1))
    student.requires_grad_()
    found = kl_divergence(student, teacher, tp_group=one_rank())
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected(student.float(), teacher.float(), 1.0), **EXACT)
    found.sum().backward()
    assert student.grad is not None
    assert student.grad.dtype == torch.bfloat16


def test_distances_of_hidden_states_are_those_of_torch() -> None:
    x = draw(6, 2, 8, seed=0)
    y = draw(6, 2, 8, seed=1)
    ones = torch.ones(12)
    wanted = F.cosine_embedding_loss(x.flatten(0, 1), y.flatten(0, 1), ones, reduction="none")
    torch.testing.assert_close(cosine_loss(x, y).flatten(), wanted, **tolerances.of(torch.float32))
    torch.testing.assert_close(mse_loss(x, y), F.mse_loss(x, y, reduction="none").mean(-1))


def total(sums: Tensor, *, skip: bool, scale: float = 1.0) -> float:
    found = balance_losses(sums, skip_lm_loss=skip, kd_loss_scale=scale, cp_group=one_rank())
    return float(found)


def test_the_balance_makes_losses_equally_large() -> None:
    sums = torch.tensor([12.0, 3.0, 0.5])
    assert total(sums[:2], skip=True) == 3.0
    assert total(sums, skip=True) == 6.0, "the intermediate loss is as large as that of logits"
    assert total(sums[:2], skip=False, scale=0.5) == 18.0, "half of the language model's is added"
    assert math.isclose(total(sums, skip=False, scale=2.0), 36.0)
    assert total(torch.tensor([12.0, 0.0, 0.0]), skip=False) == 12.0, "nothing left to learn"


def test_the_balance_has_no_gradient() -> None:
    sums = torch.tensor([12.0, 3.0, 0.5], requires_grad=True)
    balance_losses(sums, skip_lm_loss=False, kd_loss_scale=1.0, cp_group=one_rank()).backward()
    assert sums.grad is not None
    torch.testing.assert_close(sums.grad, torch.tensor([1.0, 2.0, 12.0]))


def from_store(student: Tensor, teacher: Tensor, k: int) -> Tensor:
    ids, log_probs = find_most_probable(teacher, k, tp_group=one_rank(), vocab_size=SIZE)
    return divergence_from_stored(student, ids, log_probs, tp_group=one_rank(), vocab_size=SIZE)


def test_a_store_of_all_tokens_gives_the_complete_divergence() -> None:
    student = draw(4, 3, SIZE, seed=0).requires_grad_()
    teacher = draw(4, 3, SIZE, seed=1)
    scale = draw(4, 3, seed=2)
    found = from_store(student, teacher, SIZE)
    wanted = expected(student, teacher, 1.0)
    torch.testing.assert_close(found, wanted, **EXACT)
    gradients = [torch.autograd.grad((x * scale).sum(), student)[0] for x in (found, wanted)]
    torch.testing.assert_close(*gradients, **EXACT)


def test_tokens_that_are_not_stored_count_as_one() -> None:
    student = draw(6, SIZE, seed=0).double()
    teacher = draw(6, SIZE, seed=1).double()
    student.requires_grad_()
    ids = teacher.topk(4).indices

    def merged(logits: Tensor) -> Tensor:
        p = logits.softmax(-1)
        top = p.gather(-1, ids)
        return torch.cat([top, 1 - top.sum(-1, keepdim=True)], -1).log()

    wanted = F.kl_div(merged(student), merged(teacher), reduction="none", log_target=True).sum(-1)
    found = from_store(student, teacher, 4)
    torch.testing.assert_close(found, wanted)
    gradients = [torch.autograd.grad(x.sum(), student)[0] for x in (found, wanted)]
    torch.testing.assert_close(*gradients)


def test_a_token_without_entries_has_no_loss() -> None:
    student = draw(2, SIZE, seed=0).requires_grad_()
    ids = torch.zeros(2, 3, dtype=torch.int32)
    log_probs = torch.full((2, 3), float("-inf"))
    log_probs[1, 0] = -0.1
    group: Any = {"tp_group": one_rank(), "vocab_size": SIZE}
    loss = divergence_from_stored(student, ids, log_probs, **group)
    loss.sum().backward()
    assert student.grad is not None
    assert loss[0] == 0
    assert loss[1] > 0
    assert not student.grad[0].any()
    assert student.grad.isfinite().all()


def top_sharded(rank: int, world_size: int, k: int) -> tuple[Tensor, ...]:
    group = dist.group.WORLD
    assert group is not None
    both = [F.pad(draw(4, SIZE, seed=seed), (0, PADDED - SIZE), value=5.0) for seed in (0, 1)]
    student, teacher = (x.chunk(world_size, -1)[rank].contiguous() for x in both)
    student.requires_grad_()
    shared: Any = {"tp_group": group, "vocab_size": SIZE}
    ids, log_probs = find_most_probable(teacher, k, **shared)
    loss = divergence_from_stored(student, ids, log_probs, **shared)
    (gradient,) = torch.autograd.grad(loss.sum(), student)
    return ids, log_probs, loss.detach(), gradient


@pytest.mark.parametrize("k", [3, 12, SIZE])
def test_the_most_probable_tokens_of_a_sharded_vocabulary_are_the_same(k: int) -> None:
    student = draw(4, SIZE, seed=0).requires_grad_()
    teacher = draw(4, SIZE, seed=1)
    ids, log_probs = find_most_probable(teacher, k, tp_group=one_rank(), vocab_size=SIZE)
    loss = from_store(student, teacher, k)
    (gradient,) = torch.autograd.grad(loss.sum(), student)
    parts = run_ranks(top_sharded, 4, k)  # the last rank has columns of padding
    for its_ids, its_log_probs, its_loss, _ in parts:
        assert its_ids.equal(ids)
        torch.testing.assert_close(its_log_probs, log_probs, **EXACT)
        torch.testing.assert_close(its_loss, loss.detach(), **EXACT)
    found = torch.cat([part for *_, part in parts], -1)[..., :SIZE]
    torch.testing.assert_close(found, gradient, **EXACT)
