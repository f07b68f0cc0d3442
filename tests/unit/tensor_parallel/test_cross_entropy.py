"""The loss over a vocabulary equals torch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megatron.core.config.errors import DataError
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from tests.support import tolerances
from tests.support.one_process import one_rank


def loss_of(logits: torch.Tensor, target: torch.Tensor, **options: object) -> torch.Tensor:
    smoothing = options.pop("label_smoothing", 0.0)
    return vocab_parallel_cross_entropy(logits, target, smoothing, tp_group=one_rank(), **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("padding", [0, 5])
def test_values_and_gradients_are_torchs(
    dtype: torch.dtype, smoothing: float, padding: int
) -> None:
    torch.manual_seed(0)
    logits = (3 * torch.randn(4, 3, 11 + padding)).to(dtype).requires_grad_()
    target = torch.randint(0, 11, (4, 3))
    weight = torch.rand(4, 3)
    loss = loss_of(logits, target, vocab_size=11, label_smoothing=smoothing)
    (loss * weight).sum().backward()
    plain = logits.detach().float().requires_grad_()
    over_all = smoothing * 11 / 10  # torch's smoothing counts the target, too
    expected = F.cross_entropy(
        plain[..., :11].flatten(0, 1), target.flatten(), reduction="none", label_smoothing=over_all
    ).view(4, 3)
    (expected * weight).sum().backward()
    torch.testing.assert_close(loss, expected, **tolerances.of(torch.float32))
    assert loss.dtype == torch.float32
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad, plain.grad.to(dtype), **tolerances.of(dtype))


def test_a_negative_target_costs_nothing() -> None:
    logits = torch.randn(3, 7, requires_grad=True)
    loss = loss_of(logits, torch.tensor([2, -100, 6]))
    loss.sum().backward()
    assert loss[1] == 0
    assert logits.grad is not None
    assert (logits.grad[1] == 0).all()
    assert (logits.grad[0] != 0).all()


def test_large_logits_do_not_overflow() -> None:
    logits = torch.tensor([[1e4, 0.0, -1e4]], requires_grad=True)
    loss = loss_of(logits, torch.tensor([2]))
    loss.sum().backward()
    assert loss.tolist() == [2e4]
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


def test_a_target_beyond_the_vocabulary_is_an_error() -> None:
    with pytest.raises(DataError, match="vocabulary of 5"):
        loss_of(torch.randn(2, 8), torch.tensor([1, 5]), vocab_size=5)
