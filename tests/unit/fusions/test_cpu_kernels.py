"""What all compiled kernels have in common: bits, instruction sets, what they take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core import cpu_kernels
from megatron.core.fusions.linear_cross_entropy import loss_and_gradient
from tests import tolerances
from tests.unit.fusions.conftest import kernels_off
from tests.unit.one_process import one_rank

kernels: Any = cpu_kernels.compiled()
pytestmark = pytest.mark.skipif(
    kernels is None, reason="not installed: python setup.py build_ext --inplace"
)
FORMATS = [torch.float32, torch.bfloat16]


def cross_entropy(dtype: torch.dtype) -> list[Tensor]:
    logits = torch.randn(37, 1501).mul_(4).to(dtype)
    target = torch.randint(1490, (37,))
    target[5] = -100
    loss = loss_and_gradient(logits, target, group=one_rank(), num_columns=1490)
    logits[5] = 0  # nobody reads the gradient of a token that does not count
    return [loss, logits]


# Each gives values and gradients of work too large for one piece, in odd sizes.
WORK: list[Callable[[torch.dtype], list[Tensor]]] = [cross_entropy]


def results(work: Callable[[torch.dtype], list[Tensor]], dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    return work(dtype)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("work", WORK, ids=lambda work: work.__name__)
@pytest.mark.feature("Kernels: C++ on a CPU, in AVX-512, AVX2 and plain, of the same bits always")
def test_bits_do_not_depend_on_the_run_or_the_number_of_threads(
    work: Any, dtype: torch.dtype, threads: Callable[[int], None]
) -> None:
    expected = results(work, dtype)
    for count in (1, 3):
        threads(count)
        torch.testing.assert_close(results(work, dtype), expected, **tolerances.BITWISE)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("work", WORK, ids=lambda work: work.__name__)
def test_every_instruction_set_has_the_values_of_the_plain_form(
    work: Any, dtype: torch.dtype
) -> None:
    with kernels_off():
        expected = results(work, dtype)
    try:
        for name in reversed(kernels.instruction_sets()):
            kernels.use(name)
            torch.testing.assert_close(results(work, dtype), expected, **tolerances.of(dtype))
    finally:
        kernels.use(kernels.instruction_sets()[0])


def test_only_tensors_of_one_known_format_in_real_memory_are_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = torch.ones(4, 4)
    assert cpu_kernels.take(x, None, x)
    assert not cpu_kernels.take(x, x.bfloat16())
    assert not cpu_kernels.take(x.double())
    assert not cpu_kernels.take(x.to("meta"))
    assert not cpu_kernels.take(x.as_subclass(type("Other", (Tensor,), {})))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not cpu_kernels.take(x)
