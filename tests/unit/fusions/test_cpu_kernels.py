"""What all compiled kernels have in common: bits, instruction sets, what they take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.activations import openai_gelu, quick_gelu, squared_relu
from megatron.core.device import cpu_kernels
from megatron.core.distributed.grad_buffer import add_into
from megatron.core.fusions.bias_glu import activation, glu
from megatron.core.fusions.causal_attention import causal_attention
from megatron.core.fusions.linear_cross_entropy import VocabularyPart, loss_and_gradient
from megatron.core.fusions.rms_norm import norm_rows
from megatron.core.fusions.rope import RotaryTable, apply_rotary
from megatron.core.optimizer.clip_grads import sum_of_squares
from megatron.core.transformer.moe.token_dispatcher import by_expert, combine
from tests.support import tolerances
from tests.support.one_process import one_rank

kernels: Any = cpu_kernels.compiled()
pytestmark = pytest.mark.skipif(
    kernels is None, reason="not installed: python setup.py build_ext --inplace"
)
FORMATS = [torch.float32, torch.bfloat16]
As = Callable[[Tensor], Tensor]  # float32 to the format of the work


def cross_entropy(as_given: As) -> list[Tensor]:
    logits = as_given(torch.randn(37, 1501).mul_(4))
    target = torch.randint(1490, (37,))
    target[5] = -100
    loss = loss_and_gradient(logits, target, VocabularyPart(one_rank(), 1490))
    logits[5] = 0  # nobody reads the gradient of a token that does not count
    return [loss, logits]


def with_gradients(
    function: Callable[..., Tensor], *inputs: Tensor, scale: float = 1
) -> list[Tensor]:
    """Return the output and the gradients; that of the output is random, times a power of two."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = function(*leaves)
    grad = torch.randn(out.shape).bfloat16().to(out.dtype) * scale
    return [out, *torch.autograd.grad(out, leaves, grad)]


def activations(as_given: As) -> list[Tensor]:
    x = as_given(torch.randn(131, 333).mul_(3))
    acts = (F.silu, openai_gelu, quick_gelu, squared_relu)
    return [t for act in acts for t in with_gradients(lambda x, act=act: activation(x, act), x)]


def gates(as_given: As) -> list[Tensor]:
    gate_up, weights = as_given(torch.randn(131, 602)), as_given(torch.rand(131))
    found = []
    for act in (F.silu, F.gelu, openai_gelu, quick_gelu, squared_relu):
        found += with_gradients(lambda x, act=act: glu(x, act), gate_up)
    more = with_gradients(lambda x, w: glu(x, quick_gelu, 0.7, 1.0, w), gate_up, weights)
    return [*found, *more]


def norms(as_given: As) -> list[Tensor]:
    """Gradients of weights are sums over 95 rows: the scale makes them of order one."""
    x, weight, bias = (as_given(torch.randn(shape)) for shape in ((19, 5, 77), 77, 77))
    found = with_gradients(lambda x, w: norm_rows(x, w, None, 1e-5), x, weight, scale=1 / 8)
    if x.dtype == torch.float32:  # torch's own, which is not in question
        return found
    more = with_gradients(lambda *a: norm_rows(*a, 1e-5), x, weight, bias, scale=1 / 8)
    return found + more


def rotations(as_given: As) -> list[Tensor]:
    x, found = as_given(torch.randn(129, 2, 3, 50)), []
    for sequences, interleaved in ((1, False), (2, True)):
        angle = torch.randn(129, sequences, 1, 19)
        table = RotaryTable(as_given(angle.cos()), as_given(angle.sin()), interleaved)
        found += with_gradients(lambda x, table=table: apply_rotary(x[..., 3:], table), x)
    return found


def attention(as_given: As) -> list[Tensor]:
    inputs = (as_given(torch.randn(150, 2, 3, 16)) for _ in range(3))
    return with_gradients(lambda *a: causal_attention(*a, 0.25), *inputs)


def sums(as_given: As) -> list[Tensor]:
    total = torch.randn(123, 457)
    add_into(total, torch.randn(123, 457).bfloat16())
    return [total]


def rows_of_tokens(as_given: As) -> list[Tensor]:
    """With a gap in the last rows, which some visits do not have."""
    order = by_expert(torch.rand(257, 7).topk(3).indices, 700)
    rows = as_given(torch.randn(700, 93))
    return with_gradients(lambda x: combine(x, order), rows)


def squares(as_given: As) -> list[Tensor]:
    given = [as_given(torch.randn(size)) for size in (3, 70001, 0, 5000)]
    return [sum_of_squares(given), sum_of_squares([t.abs().sqrt() for t in given])]


# Each gives values and gradients of work too large for one piece, in odd sizes.
WORK: list[Callable[[As], list[Tensor]]] = [
    cross_entropy,
    activations,
    gates,
    norms,
    rotations,
    attention,
    sums,
    rows_of_tokens,
    squares,
]


def results(work: Callable[[As], list[Tensor]], dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    return work(lambda x: x.to(dtype))


def in_double(work: Callable[[As], list[Tensor]], dtype: torch.dtype) -> list[Tensor]:
    """Of the same numbers, by the plain form: no kernel takes float64."""
    torch.manual_seed(0)
    return [t.float() for t in work(lambda x: x.to(dtype).double())]


def each_instruction_set() -> Iterator[None]:
    """Those of this CPU, one after the other."""
    try:
        for name in reversed(kernels.instruction_sets()):
            kernels.use(name)
            yield
    finally:
        kernels.use(kernels.instruction_sets()[0])


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
def test_every_instruction_set_has_the_values_of_the_plain_form_in_double(
    work: Any, dtype: torch.dtype
) -> None:
    expected = in_double(work, dtype)
    for _ in each_instruction_set():
        found = [t.float() for t in results(work, dtype)]
        torch.testing.assert_close(found, expected[: len(found)], **tolerances.of(dtype))


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("act", [F.silu, F.gelu, openai_gelu, quick_gelu, squared_relu])
def test_activations_of_huge_numbers_and_of_none_are_those_of_torch(
    act: Any, dtype: torch.dtype
) -> None:
    sizes = torch.tensor([0, 1e-30, 20, 87.3, 88.2, 89, 104, 1e9, 1e20, 3e38, float("inf")])
    x = torch.cat([sizes, -sizes, torch.tensor([float("nan")])]).to(dtype).requires_grad_()
    plain = act(x.double())
    (slope,) = torch.autograd.grad(plain.sum(), x)
    expected = plain.to(dtype)
    for _ in each_instruction_set():
        y = activation(x, act)
        torch.testing.assert_close(y, expected, equal_nan=True, **tolerances.of(dtype))
        (found,) = torch.autograd.grad(y.sum(), x)
        where = slope.isfinite()  # torch's are NaN where a square has no room
        torch.testing.assert_close(found[where], slope[where], **tolerances.of(dtype))


def test_only_tensors_of_one_known_format_are_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = torch.ones(4, 4)
    assert cpu_kernels.take(x, None, x)
    assert not cpu_kernels.take(x, x.bfloat16())
    assert not cpu_kernels.take(x.double())
    assert not cpu_kernels.take(x, x.double())
    planned = x.to("meta")  # has no address, and a plan takes the ways of a run
    assert cpu_kernels.take(planned)
    cpu_kernels.run("silu", [planned, planned], format=x.dtype, count=16)
    assert not cpu_kernels.take(x.as_subclass(type("Other", (Tensor,), {})))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not cpu_kernels.take(x)


def test_a_fusion_that_is_switched_off_runs_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    run = cpu_kernels.run
    monkeypatch.setattr(cpu_kernels, "run", lambda *a, **k: ran.append(a[0]) or run(*a, **k))
    x, angle = torch.randn(8, 1, 2, 4, requires_grad=True), torch.randn(8, 1, 1, 2)
    for fused in (True, False):
        ran.clear()
        y = apply_rotary(x, RotaryTable(angle.cos(), angle.sin()), fused=fused)
        y = causal_attention(y, y, y, 0.5, fused=fused)
        glu(y, F.silu, fused=fused).sum().backward()
        assert bool(ran) == fused
