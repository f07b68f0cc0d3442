"""A table that is read and multiplied with: gradients of the plain form, in any order of uses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.core.tensor_parallel.tied_embedding import look_up
from tests.support import tolerances

IDS = torch.tensor([[3, 0, 3, 9], [3, 1, 0, 3]])


def weight_of(dtype: torch.dtype) -> Tensor:
    values = torch.randn(11, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return values.to(dtype).requires_grad_()


def plain(weight: Tensor) -> Tensor:
    return (F.embedding(IDS, weight).tanh() @ weight.t()).logsumexp(-1).sum()


def tied(weight: Tensor) -> Tensor:
    rows, table = look_up(IDS, weight)
    return (rows.tanh() @ table.t()).logsumexp(-1).sum()


def only_read(weight: Tensor) -> Iterator[Tensor]:
    yield F.embedding(IDS, weight).tanh().sum()
    yield look_up(IDS, weight)[0].tanh().sum()


@pytest.mark.feature("Tied embeddings: one gradient of both uses, no table of zeros, on a CPU")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_gradients_are_those_of_the_plain_form(dtype: torch.dtype) -> None:
    ours, exact = weight_of(dtype), weight_of(dtype)
    for _ in range(2):  # the second pass adds to the first
        found, expected = tied(ours), plain(exact)
        found.backward()
        expected.backward()
    torch.testing.assert_close(found, expected, **tolerances.of(dtype))
    torch.testing.assert_close(ours.grad, exact.grad, **tolerances.of(dtype))


def test_a_pass_may_be_repeated() -> None:
    weight = weight_of(torch.float64)
    loss = tied(weight)
    grads = [torch.autograd.grad(loss, weight, retain_graph=True)[0] for _ in range(2)]
    assert torch.equal(*grads)


def test_a_table_that_is_read_alone_has_its_gradient() -> None:
    weight = weight_of(torch.float64)
    found, expected = (torch.autograd.grad(loss, weight)[0] for loss in only_read(weight))
    torch.testing.assert_close(found, expected, **tolerances.of(torch.float64))


def test_many_gradients_of_a_row_are_summed_before_they_are_rounded() -> None:
    """A sum of 1 and 256 times 2^-9 in bf16, one after the other, stays 1."""
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    rows, table = look_up(torch.zeros(256, dtype=torch.long), weight)
    (rows.sum() * 2.0**-9 + table.sum()).backward()
    assert weight.grad.flatten().tolist() == [1.5, 1.0]


class _Sizes(TorchDispatchMode):
    """Notes how many numbers each operation that makes or adds a tensor of gradients writes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.shape == (11, 6):
            self.seen.append(func.overloadpacket.__name__)
        return out


def test_no_second_table_is_made() -> None:
    weight = weight_of(torch.float32)
    loss = tied(weight)
    with _Sizes() as sizes:
        loss.backward()
    assert set(sizes.seen) <= {"mm", "t", "detach", "index_add_", "transpose", "view"}
