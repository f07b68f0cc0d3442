"""Two passes take turns: where they give way, and what becomes of one when the other fails."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.pipeline_parallel.pass_interleaving import interleave, yield_to_peer


class Travel(torch.autograd.Function):
    """Something that travels, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, said: list[str], name: str) -> Tensor:
        ctx.said, ctx.name = said, name
        said.append(f"{name} sends")
        yield_to_peer()
        said.append(f"{name} receives")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.said.append(f"gradient of {ctx.name} sends")
        yield_to_peer()
        ctx.said.append(f"gradient of {ctx.name} receives")
        return grad, None, None


def test_a_forward_and_a_backward_pass_compute_while_the_other_one_travels() -> None:
    said: list[str] = []
    x = torch.ones(2, requires_grad=True)
    earlier = Travel.apply(Travel.apply(x, said, "a"), said, "b").sum()
    assert said == ["a sends", "a receives", "b sends", "b receives"], "alone it does not wait"
    said.clear()
    begun: list[int] = []
    interleave(
        lambda: Travel.apply(Travel.apply(x, said, "c"), said, "d"), earlier.backward, begun.append
    )
    assert said == [
        "c sends", "gradient of b sends", "c receives", "d sends",
        "gradient of b receives", "gradient of a sends", "d receives", "gradient of a receives",
    ]  # fmt: skip
    assert begun == [0, 1, 0, 1]
    assert x.grad is not None
    assert x.grad.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("when", ["at once", "later"])
def test_the_failure_of_one_ends_both(which: int, when: str) -> None:
    ended: list[str] = []

    def fails() -> None:
        if when == "later":
            yield_to_peer()
        raise ValueError("broken")

    def goes_on() -> None:
        try:
            for _ in range(3):
                yield_to_peer()
        finally:
            ended.append("unwound")

    passes = (fails, goes_on) if which == 0 else (goes_on, fails)
    threads = threading.active_count()
    with pytest.raises(ValueError, match="broken"):
        interleave(*passes)
    assert threading.active_count() == threads
    assert ended == ([] if (which, when) == (0, "at once") else ["unwound"])
    yield_to_peer()  # nobody is left
