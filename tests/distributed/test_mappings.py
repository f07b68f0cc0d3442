"""Every collective of tensor parallelism against its formula in one process, both directions.

The formula takes what all ranks put in and says what each gets.  The loss weighs every rank's
output; where all ranks get the same, it is counted once, as the parts of a model do that compute
the same on all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.tensor_parallel import mappings
from tests.support import tolerances
from tests.support.ranks import run_ranks

RANKS = 4


@dataclass(frozen=True)
class Case:
    """``formula`` maps all ranks' inputs to all ranks' outputs."""

    function: Callable[..., Tensor]
    formula: Callable[[list[Tensor]], list[Tensor]]
    same_in: bool = False  # all ranks hold the same input, and get the whole gradient of it
    same_out: bool = False  # all ranks get the same output and gradient


def total(xs: list[Tensor]) -> Tensor:
    return torch.stack(xs).sum(0)


def to_all(x: Tensor) -> list[Tensor]:
    return [x] * RANKS


def cut(x: Tensor, dim: int) -> list[Tensor]:
    return list(x.chunk(RANKS, dim))


GATHER_ROWS = mappings.gather_from_sequence_parallel_region
CASES = {
    "copy": Case(
        mappings.copy_to_tensor_model_parallel_region, lambda xs: to_all(xs[0]), same_in=True
    ),
    "reduce": Case(
        mappings.reduce_from_tensor_model_parallel_region,
        lambda xs: to_all(total(xs)),
        same_out=True,
    ),
    "gather": Case(
        mappings.gather_from_tensor_model_parallel_region,
        lambda xs: to_all(torch.cat(xs, -1)),
        same_out=True,
    ),
    "scatter": Case(
        mappings.scatter_to_tensor_model_parallel_region, lambda xs: cut(xs[0], -1), same_in=True
    ),
    "all-gather last dim": Case(
        mappings.all_gather_last_dim_from_tensor_parallel_region,
        lambda xs: to_all(torch.cat(xs, -1)),
    ),
    "reduce-scatter last dim": Case(
        mappings.reduce_scatter_last_dim_to_tensor_parallel_region, lambda xs: cut(total(xs), -1)
    ),
    "gather sequence": Case(GATHER_ROWS, lambda xs: to_all(torch.cat(xs))),
    "gather sequence for the same use": Case(
        partial(GATHER_ROWS, tensor_parallel_output_grad=False),
        lambda xs: to_all(torch.cat(xs)),
        same_out=True,
    ),
    "scatter sequence": Case(
        mappings.scatter_to_sequence_parallel_region, lambda xs: cut(xs[0], 0), same_in=True
    ),
    "reduce-scatter sequence": Case(
        mappings.reduce_scatter_to_sequence_parallel_region, lambda xs: cut(total(xs), 0)
    ),
    "all-to-all": Case(
        mappings.all_to_all_first_dim,
        lambda xs: [torch.stack([x[r] for x in xs]) for r in range(RANKS)],
    ),
}


def draw(*seed: int, shape: tuple[int, ...] = (RANKS, 3, 2 * RANKS)) -> Tensor:
    generator = torch.Generator().manual_seed(sum(s * 100**i for i, s in enumerate(seed)))
    return torch.randn(shape[::-1], generator=generator, dtype=torch.float64).permute(2, 1, 0)


def alone(case: Case) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs and input gradients of all ranks; inputs do not lie in order in memory."""
    if case.same_in:
        xs = to_all(draw(0).requires_grad_())
    else:
        xs = [draw(r).requires_grad_() for r in range(RANKS)]
    ys = case.formula(xs)
    counted = ys[:1] if case.same_out else ys
    sum((y * weight(case, r, y)).sum() for r, y in enumerate(counted)).backward()
    return [y.detach() for y in ys], [x.grad for x in xs]


def weight(case: Case, rank: int, y: Tensor) -> Tensor:
    return draw(0 if case.same_out else rank, 1, shape=tuple(y.shape))


def on_ranks(rank: int, world_size: int) -> dict[str, Any]:
    found = {}
    for name, case in CASES.items():
        x = draw(0 if case.same_in else rank).requires_grad_()
        y = case.function(x, group=dist.group.WORLD)
        (y * weight(case, rank, y)).sum().backward()
        found[name] = y.detach(), x.grad
    return found


def test_values_and_gradients_are_those_of_one_process() -> None:
    ranks = run_ranks(on_ranks, RANKS)
    for name, case in CASES.items():
        for rank, (y, grad) in enumerate(zip(*alone(case), strict=True)):
            found_y, found_grad = ranks[rank][name]
            for found, expected in ((found_y, y), (found_grad, grad)):
                assert found.shape == expected.shape, name
                torch.testing.assert_close(found, expected, **tolerances.of(torch.float64))
