"""Adam on state in fewer bits: what the plain form makes of it, to the bit where that is exact."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.core.device import cpu_kernels
from megatron.core.fusions import kernels
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer.reduced_precision_state import StateStorage
from megatron.core.optimizer.update_rules import AdamW
from tests.gpu.conftest import IS_INTERPRETED
from tests.support import tolerances

adam: Any = pytest.importorskip("megatron.core.fusions.triton.adam")
SIZE = 8 * 128 + 200  # a program and a bit; a block of 128 and a bit
CHUNK = 16 if IS_INTERPRETED else 128  # rows of a program: the interpreter runs them one by one
FEWER_BITS: dict[str, Any] = {
    "use_precision_aware_optimizer": True,
    "exp_avg_dtype": "bf16",
    "exp_avg_sq_dtype": "fp16",
}


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adam, "_CHUNK", CHUNK)


def numbers(where: str, seed: int) -> Tensor:
    """Of few bits, so that means of a half and a half are exact.

    Neighbours are of sizes that no format of 16 or 8 bits has all of.
    """
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-15, 16, (SIZE,), generator=generator).float()
    sizes = torch.arange(SIZE) * 7 % 37
    return (codes * 2.0 ** (-sizes)).to(where)


def after(steps: int, where: str, dtype: torch.dtype, **numbers_of: Any) -> dict[str, Tensor]:
    """State of a parameter; betas of a half."""
    config = OptimizerConfig(
        adam_beta1=0.5, adam_beta2=0.5, use_precision_aware_optimizer=True, **numbers_of
    )
    param = nn.Parameter(numbers(where, 0).to(dtype))
    rule = AdamW([{"params": [param], "lr": 0.25, "weight_decay": 0.1}], config)
    version = param._version
    for step in range(steps):
        param.grad = numbers(where, step + 1).to(dtype)
        rule.begin_step()
        rule.step(divisor=2.0)
    assert param._version > version or dtype == torch.float32  # what quantized weights look at
    kept = {"param": param.detach()}
    for key, state in rule.state[param].items():
        if isinstance(state, StateStorage):
            kept |= {f"{key} {i}": t for i, t in enumerate(state.tensors)}
            kept[key] = state.read()
        else:
            kept[key] = state
    return kept


FORMATS = ["fp32", "bf16", "fp16", "fp8"]


@pytest.mark.parametrize("square", FORMATS)
@pytest.mark.parametrize("mean", FORMATS)
def test_moments_are_rounded_by_the_same_noise(
    mean: str, square: str, where: str, plain: Callable[..., Any]
) -> None:
    formats = {"exp_avg_dtype": mean, "exp_avg_sq_dtype": square}

    def run() -> dict[str, Tensor]:
        return after(2, where, torch.bfloat16, **formats)

    ours, expected = run(), plain(run)
    for key in ours:
        is_moment = key.startswith("exp_avg")
        near = tolerances.BITWISE if is_moment else tolerances.of(torch.float32)
        if key in ("param", "main 0"):  # halves of a number
            continue
        torch.testing.assert_close(ours[key], expected[key], **near)


@pytest.mark.parametrize("weight", [torch.bfloat16, torch.float16])
def test_a_float32_parameter_is_rounded_into_the_weight(
    where: str, plain: Callable[..., Any], weight: torch.dtype
) -> None:
    def run() -> tuple[Tensor, Tensor]:
        param = nn.Parameter(numbers(where, 0))
        config = OptimizerConfig(adam_beta1=0.5, adam_beta2=0.5)
        rule = AdamW([{"params": [param], "lr": 0.25, "weight_decay": 0.1}], config)
        rule.weights[param] = torch.full_like(param, 9.0, dtype=weight)
        target = rule.weights[param]
        param.grad = numbers(where, 1)
        rule.begin_step()
        rule.step()
        if param in rule.weights:  # the plain form leaves the copy to the optimizer
            target.copy_(param.detach())
        return param.detach(), target

    (param, written), expected = run(), plain(run)
    torch.testing.assert_close(written, param.to(weight), **tolerances.BITWISE)
    torch.testing.assert_close(param, expected[0], **tolerances.of(torch.float32))


@pytest.mark.skipif(not IS_INTERPRETED, reason="both kernels on tensors of the CPU")
@pytest.mark.skipif(
    cpu_kernels.compiled() is None, reason="not installed: python setup.py build_ext --inplace"
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moments_have_the_bits_of_the_compiled_cpu_kernel(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
    formats = {"exp_avg_dtype": name, "exp_avg_sq_dtype": name}
    ours = after(3, "cpu", torch.bfloat16, **formats)
    compiled = importlib.import_module("megatron.core.fusions.cpu.ops")
    monkeypatch.setattr(kernels, "find", lambda name, *tensors: compiled)
    expected = after(3, "cpu", torch.bfloat16, **formats)
    for key in ("exp_avg", "exp_avg_sq"):
        torch.testing.assert_close(ours[key], expected[key], **tolerances.BITWISE)
    near = tolerances.of(torch.float32)
    torch.testing.assert_close(ours["main"], expected["main"], **near)


def many(where: str) -> list[nn.Parameter]:
    """Return bf16 and fp32 parameters of all sizes; some begin or end within 16 bytes."""
    generator = torch.Generator().manual_seed(1)
    params = []
    for dtype in (torch.bfloat16, torch.float32):
        chunk = CHUNK * 128
        for size in (1, 37, 0, 128, chunk, chunk + 16, 2 * chunk + 200):
            values = torch.randn(size, generator=generator).to(where, dtype)
            params.append(nn.Parameter(values))
        whole = torch.randn(131, generator=generator).to(where, dtype)
        params.append(nn.Parameter(whole[3:]))
    return params


def updated(params: list[nn.Parameter], accepted: bool | None) -> AdamW:
    """Update ``params`` twice; gradients and moments are those of one seed.

    Betas and divisor are powers of two and gradients have 8 bits, so that each moment is rounded
    once: in another rounding, a few of 200,000 would get other random bits.
    """
    config = OptimizerConfig(adam_beta1=0.5, adam_beta2=0.5, **FEWER_BITS)
    rule = AdamW([{"params": params, "lr": 0.1, "weight_decay": 0.1}], config)
    generator = torch.Generator().manual_seed(2)
    for decision in (None, accepted):
        for p in params:
            grad = torch.randn(p.shape, generator=generator).bfloat16()
            p.grad = grad.to(p.device, p.dtype)
        where = params[0].device
        rule.begin_step(None if decision is None else torch.tensor(decision, device=where))
        rule.step(torch.tensor(2.0, device=where))
    return rule


@pytest.mark.feature("Optimizer: Adam on a GPU updates all parameters of a format in one launch")
def test_one_launch_updates_parameters_of_all_sizes(
    where: str, plain: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    launches, launch = [], adam._launch
    monkeypatch.setattr(adam, "_launch", lambda *a: launches.append(a[2]) or launch(*a))
    found = many(where)
    updated(found, True)
    # bf16 and fp32 parameters, and of both those that allow wide loads and the others
    assert len(launches) == 2 * 4
    expected = many(where)
    plain(lambda: updated(expected, True))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, **tolerances.of(ours.dtype))


def test_a_step_that_the_device_does_not_accept_changes_nothing(where: str) -> None:
    done, tried = many(where), many(where)
    config = OptimizerConfig(**FEWER_BITS)
    rule = AdamW([{"params": tried, "lr": 0.1, "weight_decay": 0.1}], config)
    bad = torch.tensor(False, device=where)
    monkey = pytest.MonkeyPatch()
    with monkey.context() as patch:  # as on a device whose values the host does not know
        patch.setattr(torch.Tensor, "is_cpu", property(lambda self: False))
        for p in tried:
            p.grad = torch.full_like(p, torch.nan)
        rule.begin_step(bad)
        rule.step(torch.tensor(torch.nan, device=where))
    torch.testing.assert_close(tried, done, **tolerances.BITWISE)
    assert rule.steps_done == 0
    for param, state in rule.state.items():
        for key, kept in state.items():
            values = kept.read() if isinstance(kept, StateStorage) else kept
            assert torch.equal(values, param.float()) if key == "main" else not values.any()


def test_float32_parameters_with_moments_in_fewer_bits(
    where: str, plain: Callable[..., Any]
) -> None:
    def run() -> Tensor:
        return after(3, where, torch.float32, exp_avg_dtype="bf16")["param"]

    torch.testing.assert_close(run(), plain(run), **tolerances.of(torch.float32))
