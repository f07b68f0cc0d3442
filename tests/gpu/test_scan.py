"""The state-space scan in kernels has the values and gradients of the loop over tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.ssm.scan import chunked_scan
from tests.gpu.conftest import IS_INTERPRETED
from tests.unit.ssm.test_scan import sequential_scan

LIMITS = {torch.bfloat16: 1e-2, torch.float32: 3e-6}  # of the norm of the error, relative
# The gradient of A is a sum of differences that cancel.  Plain torch in float32 has 1.1e-6 where
# other gradients have 4e-7; the tensor cores of an H200, which truncate sums, had 7.5e-6.
_CANCELLATION = {"A": 4.0}


@pytest.fixture(autouse=True)
def in_float32_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding to 16 bits hides small mistakes."""
    monkeypatch.setattr("megatron.core.fusions.triton.scan.DTYPES", tuple(LIMITS))


def inputs(
    s: int,
    dtype: torch.dtype,
    where: str,
    groups: int,
    p: int = 5,
    n: int = 18,
    heads: int = 4,
) -> dict[str, Tensor]:
    """Two sequences of ``s`` tokens, heads of width ``p``, states of width ``n``.

    Few heads: Triton's interpreter runs their programs one after the other.
    """
    torch.manual_seed(s)
    wide = torch.float32
    mixed = torch.randn(s, 2, heads * p + 2 * groups * n).to(where, dtype)
    x, B, C = mixed.split([heads * p, groups * n, groups * n], -1)  # not contiguous
    return {
        "x": x.unflatten(-1, (heads, p)),
        "dt": torch.rand(s, 2, heads, device=where, dtype=wide) * 0.5 + 0.01,
        "A": -torch.rand(heads, device=where, dtype=wide) * 4 - 0.1,
        "B": B.unflatten(-1, (groups, n)),
        "C": C.unflatten(-1, (groups, n)),
        "D": torch.randn(heads, device=where, dtype=wide),
        "state": torch.randn(2, heads, p, n, device=where, dtype=wide),
    }


def answer(
    scan: Callable[..., tuple[Tensor, Tensor]],
    given: dict[str, Tensor],
    dtype: torch.dtype | None = None,
    **options: Any,
) -> list[Tensor]:
    """Output, last state and the gradient of each input."""
    leaves = {k: v.detach().to(dtype or v.dtype).requires_grad_() for k, v in given.items()}
    y, state = scan(**leaves, **options)
    weights = [torch.linspace(-1, 1, t.numel(), device=t.device).view_as(t) for t in (y, state)]
    grads = [w.bfloat16().to(t.dtype) for w, t in zip(weights, (y, state), strict=True)]
    return [y, state, *torch.autograd.grad((y, state), list(leaves.values()), grads)]


def compare(given: dict[str, Tensor], chunk: int, **options: Any) -> None:
    """The reference computes in float64 on the same numbers."""
    limit = LIMITS[given["x"].dtype]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatron.core.fusions.triton.scan.LENGTH", chunk)
        found = answer(chunked_scan, given, **options)
    assert type(found[0].grad_fn).__name__ == "_ScanBackward", "the kernels were not chosen"
    wide = answer(sequential_scan, given, torch.float64, **options)
    names = ["y", "last state", *given]
    for name, ours, expected in zip(names, found, wide, strict=True):
        error = (ours.double() - expected).norm() / expected.norm().clamp_min(1e-9)
        none = torch.zeros_like(error)
        atol = limit * _CANCELLATION.get(name, 1.0)
        torch.testing.assert_close(error, none, atol=atol, rtol=0, msg=f"{name}: {error}")


@pytest.mark.parametrize("dtype", LIMITS)
def test_heads_and_states_as_wide_as_those_of_a_model(dtype: torch.dtype, where: str) -> None:
    """The first test: `compiling --once` compiles the kernels for it."""
    heads = 1 if IS_INTERPRETED else 2
    compare(inputs(130, dtype, where, 1, p=64, n=128, heads=heads), 128)


@pytest.mark.parametrize(
    ("tokens", "chunk", "groups"), [(70, 32, 2), (64, 32, 1), (7, 64, 4), (1, 64, 2)]
)
def test_chunks_answer_as_the_loop_over_tokens_does(
    tokens: int, chunk: int, groups: int, where: str
) -> None:
    compare(inputs(tokens, torch.float32, where, groups), chunk)


@pytest.mark.parametrize("lengths", [[9, 3, 28], [32, 8], [1] * 40, [39, 1]])
def test_packed_sequences_do_not_see_each_other(lengths: list[int], where: str) -> None:
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    compare(inputs(40, torch.float32, where, 2, heads=2), 32, sequence=sequence.to(where))


def test_without_a_state_and_without_a_skip(where: str) -> None:
    given = inputs(65, torch.float32, where, 1)
    del given["state"], given["D"]
    compare(given, 32)


def test_many_heads_of_a_group_take_several_programs(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron.core.fusions.triton.scan._PROGRAMS", 12)
    monkeypatch.setattr("megatron.core.fusions.triton.scan._STATE", 32)
    compare(inputs(70, torch.float32, where, 2, heads=6), 32)
