"""The chunked state-space scan against the loop over tokens, float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatron.core.ssm.scan import chunked_scan
from tests.support import tolerances

_CLOSE = tolerances.of(torch.float64)


def _inputs(s: int, *, groups: int = 2) -> dict[str, Tensor]:
    """Two sequences of ``s`` tokens, six heads of width 3, a state of width 5."""
    draw = torch.Generator().manual_seed(s)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64).requires_grad_()

    def between(low: float, high: float, *shape: int) -> Tensor:
        x = torch.rand(*shape, generator=draw, dtype=torch.float64) * (high - low) + low
        return x.requires_grad_()

    return {
        "x": normal(s, 2, 6, 3),
        "dt": between(0.001, 0.5, s, 2, 6),
        "A": between(-16, -1, 6),
        "B": normal(s, 2, groups, 5),
        "C": normal(s, 2, groups, 5),
        "D": normal(6),
        "state": normal(2, 6, 3, 5),
    }


def sequential_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    state: Tensor | None = None,
    sequence: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`chunked_scan`, one token after the other: the formula."""
    wide = torch.promote_types(x.dtype, torch.float32)
    s, b, h, p = x.shape
    heads = [m.to(wide).repeat_interleave(h // m.shape[2], 2) for m in (B, C)]
    S = x.new_zeros(b, h, p, B.shape[-1], dtype=wide) if state is None else state.to(wide)
    outputs = []
    for t in range(s):
        if sequence is not None and t and sequence[t] != sequence[t - 1]:
            S = torch.zeros_like(S)
        new = (dt[t].to(wide)[..., None] * x[t].to(wide))[..., None] * heads[0][t][:, :, None]
        S = torch.exp(dt[t].to(wide) * A.to(wide))[..., None, None] * S + new
        outputs.append((S * heads[1][t][:, :, None]).sum(-1))
    y = torch.stack(outputs) if outputs else x.to(wide)
    if D is not None:
        y = y + D.to(wide)[:, None] * x.to(wide)
    return y.to(x.dtype), S


def _answer(
    scan: Callable[..., tuple[Tensor, Tensor]], given: dict[str, Tensor], **kwargs: object
) -> list[Tensor]:
    """Output, final state, and every gradient of a sum over both."""
    y, state = scan(**given, **kwargs)  # type: ignore[arg-type]
    draw = torch.Generator().manual_seed(7)
    weights = [torch.randn(t.shape, generator=draw, dtype=t.dtype) for t in (y, state)]
    total = (y * weights[0]).sum() + (state * weights[1]).sum()
    return [y, state, *torch.autograd.grad(total, list(given.values()))]


@pytest.mark.feature("Mamba: chunked scan equal to the scan token by token, any chunk length")
@pytest.mark.parametrize(
    ("tokens", "chunk", "groups"), [(16, 8, 2), (13, 4, 1), (7, 64, 6), (1, 4, 2), (9, 1, 3)]
)
def test_chunks_answer_as_the_loop_does(tokens: int, chunk: int, groups: int) -> None:
    given = _inputs(tokens, groups=groups)
    actual = _answer(chunked_scan, given, chunk_size=chunk)
    torch.testing.assert_close(actual, _answer(sequential_scan, given), **_CLOSE)


@pytest.mark.parametrize("lengths", [[5, 4, 4], [4, 9], [1] * 13, [12, 1]])
def test_packed_sequences_do_not_see_each_other(lengths: list[int]) -> None:
    given = _inputs(13)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    whole = _answer(chunked_scan, given, sequence=sequence, chunk_size=4)
    torch.testing.assert_close(whole, _answer(sequential_scan, given, sequence=sequence), **_CLOSE)
    at, state, parts = 0, given["state"], []
    for length in lengths:
        rows = slice(at, at + length)
        part = {k: given[k][rows] for k in ("x", "dt", "B", "C")}
        parts.append(sequential_scan(**part, A=given["A"], D=given["D"], state=state)[0])
        at, state = at + length, torch.zeros_like(state)
    torch.testing.assert_close(whole[0], torch.cat(parts), **_CLOSE)


def test_a_state_goes_on_where_a_scan_has_ended() -> None:
    given = _inputs(12)
    whole, final = chunked_scan(**given, chunk_size=4)
    cut = [{**given, **{k: given[k][rows] for k in ("x", "dt", "B", "C")}} for rows in _HALVES]
    first, state = chunked_scan(**cut[0], chunk_size=4)
    second, end = chunked_scan(**{**cut[1], "state": state}, chunk_size=4)
    torch.testing.assert_close(torch.cat([first, second]), whole, **_CLOSE)
    torch.testing.assert_close(end, final, **_CLOSE)


_HALVES = (slice(0, 7), slice(7, 12))


def test_strong_decay_over_a_long_chunk_overflows_nowhere() -> None:
    given = {k: v.detach() for k, v in _inputs(64).items()}
    given["dt"] = given["dt"] * 10  # the sum along a chunk passes what exp() can take
    assert (given["dt"].sum(0) * -given["A"]).max() > 1000
    torch.testing.assert_close(chunked_scan(**given), sequential_scan(**given), **_CLOSE)
