"""Adam on state in fewer bits: what the plain form makes of it, to the bit where that is exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer.reduced_precision_state import StateStorage
from megatron.core.optimizer.update_rules import AdamW
from tests import tolerances

SIZE = 8 * 128 + 200  # a program and a bit; a block of 128 and a bit


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
    config = OptimizerConfig(adam_beta1=0.5, adam_beta2=0.5, **numbers_of)
    param = nn.Parameter(numbers(where, 0).to(dtype))
    rule = AdamW([{"params": [param], "lr": 0.25, "weight_decay": 0.1}], config)
    version = param._version
    for step in range(steps):
        param.grad = numbers(where, step + 1).to(dtype)
        rule.begin_step()
        rule.step(divisor=2.0)
    assert param._version > version or dtype == torch.float32  # what quantised weights look at
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


def test_float32_parameters_with_moments_in_fewer_bits(
    where: str, plain: Callable[..., Any]
) -> None:
    def run() -> Tensor:
        return after(3, where, torch.float32, exp_avg_dtype="bf16")["param"]

    torch.testing.assert_close(run(), plain(run), **tolerances.of(torch.float32))
