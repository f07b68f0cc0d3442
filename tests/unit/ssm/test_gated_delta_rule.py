"""The chunked gated delta rule (decays per head, per channel) against the loop, float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatron.core.ssm.gated_delta_rule import gated_delta_rule
from tests.support import tolerances

_CLOSE = tolerances.of(torch.float64)


def sequential_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    state: Tensor,
    sequence: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`gated_delta_rule`, one token after the other: the formula."""
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2).unsqueeze(-1) for x in (q, k))
    outputs = []
    for t in range(len(v)):
        if sequence is not None and t and sequence[t] != sequence[t - 1]:
            state = torch.zeros_like(state)
        state = state * g[t].exp().reshape(*g.shape[1:3], -1, 1)
        correction = beta[t].unsqueeze(-1) * (v[t] - (state * k[t]).sum(-2))
        state = state + k[t] * correction.unsqueeze(-2)
        outputs.append((state * q[t]).sum(-2))
    return torch.stack(outputs), state


def _inputs(s: int, per_channel: bool = False) -> dict[str, Tensor]:
    """Two sequences of ``s`` tokens, two key heads of width 5, four value heads of width 3.

    With decays per channel two value heads, too.
    """
    heads = 2 if per_channel else 4
    draw = torch.Generator().manual_seed(s)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    inputs = {
        "q": normal(s, 2, 2, 5),
        "k": torch.nn.functional.normalize(normal(s, 2, 2, 5), dim=-1),
        "v": normal(s, 2, heads, 3),
        "g": -3 * normal(s, 2, heads, *[5] * per_channel).abs(),
        "beta": normal(s, 2, heads).sigmoid(),
        "state": normal(2, heads, 5, 3),
    }
    return {name: x.requires_grad_() for name, x in inputs.items()}


def _results(
    rule: Callable[..., tuple[Tensor, Tensor]], s: int, per_channel: bool, **more: object
) -> list[Tensor]:
    inputs = _inputs(s, per_channel)
    o, state = rule(**inputs, **more)
    weights = torch.linspace(0.5, 1.5, o.numel(), dtype=o.dtype).view(o.shape)
    ((o * weights).sum() + state.sin().sum()).backward()
    return [o.detach(), state.detach(), *(x.grad for x in inputs.values() if x.grad is not None)]


each_kind = pytest.mark.parametrize("per_channel", [False, True])


@pytest.mark.feature("Gated delta rule: chunks of matmuls give the values of the recurrence")
@each_kind
@pytest.mark.parametrize(
    ("s", "lengths"),
    [(1, None), (16, None), (37, None), (37, (5, 9, 23)), (32, (8, 8, 1, 15)), (19, (1, 1, 17))],
)
def test_chunks_give_values_and_gradients_of_the_loop(
    s: int, lengths: tuple[int, ...] | None, per_channel: bool
) -> None:
    packed = {}
    if lengths is not None:
        packed["sequence"] = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    exact = _results(sequential_rule, s, per_channel, **packed)
    found = _results(gated_delta_rule, s, per_channel, chunk_size=8, **packed)
    torch.testing.assert_close(found, exact, **_CLOSE)


@each_kind
def test_strong_decay_does_not_overflow(per_channel: bool) -> None:
    inputs = {name: x.detach() for name, x in _inputs(64, per_channel).items()}
    inputs["g"] = inputs["g"] * 50  # exp(-sum) exceeds the largest number
    inputs["v"].requires_grad_()
    o, _ = gated_delta_rule(**inputs)
    exact, _ = sequential_rule(**inputs)
    torch.testing.assert_close(o, exact, **_CLOSE)
    o.sum().backward()
    assert inputs["v"].grad.isfinite().all()


@each_kind
def test_a_sequence_may_be_computed_in_parts(per_channel: bool) -> None:
    inputs = {name: x.detach() for name, x in _inputs(30, per_channel).items()}
    whole, last = gated_delta_rule(**inputs, chunk_size=8)
    state = inputs.pop("state")
    parts = []
    for tokens in (slice(0, 13), slice(13, 14), slice(14, 30)):
        part = {name: x[tokens] for name, x in inputs.items()}
        o, state = gated_delta_rule(**part, state=state, chunk_size=8)
        parts.append(o)
    torch.testing.assert_close(torch.cat(parts), whole, **_CLOSE)
    torch.testing.assert_close(state, last, **_CLOSE)
