"""How a loss scale follows overflows."""

from __future__ import annotations

import pytest

from megatron.core.config.errors import ConfigError
from megatron.core.optimizer.grad_scaler import ConstantGradScaler, DynamicGradScaler


def scaler(**more: float) -> DynamicGradScaler:
    values = {"initial_scale": 64.0, "min_scale": 4.0, "growth_interval": 3, "hysteresis": 2}
    return DynamicGradScaler(**{**values, **more})


def scales(s: DynamicGradScaler, overflows: str) -> list[float]:
    """The scale after each step; ``x`` is an overflow, ``.`` a good step."""
    seen = []
    for mark in overflows:
        s.update(mark == "x")
        seen.append(s.scale)
    return seen


def test_the_scale_halves_when_overflows_use_up_the_hysteresis():
    assert scales(scaler(), "x.x.x") == [64, 64, 32, 32, 16]


def test_the_scale_doubles_after_a_window_of_good_steps_and_restores_the_hysteresis():
    assert scales(scaler(), "...xx") == [64, 64, 128, 128, 64]
    assert scales(scaler(), "x...x") == [64, 64, 64, 128, 128]


def test_an_overflow_starts_the_window_anew():
    assert scales(scaler(hysteresis=9), "..x..x...") == [64] * 8 + [128]


def test_the_scale_never_falls_below_its_minimum():
    assert scales(scaler(hysteresis=1), "xxxxxx") == [32, 16, 8, 4, 4, 4]


def test_a_resumed_scaler_continues():
    whole, first, second = scaler(), scaler(), scaler()
    pattern = "..x...x.x...."
    expected = scales(whole, pattern)
    scales(first, pattern[:6])
    second.load_state_dict(first.state_dict())
    assert scales(second, pattern[6:]) == expected[6:]


def test_a_constant_scale_stays_the_command_lines():
    s = ConstantGradScaler(8.0)
    s.update(True)
    s.load_state_dict({"scale": 2.0})
    assert s.scale == s.state_dict()["scale"] == 8.0


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"min_scale": 128.0}, "--min-loss-scale 128.0 must lie between 0 and --initial-loss"),
        ({"min_scale": 0.0}, "--min-loss-scale 0.0"),
        ({"growth_interval": 0}, "--loss-scale-window 0 and --hysteresis 2 must both be at least"),
        ({"hysteresis": 0}, "--hysteresis 0"),
        ({"initial_scale": -1.0}, "loss scale -1.0 must be positive"),
    ],
)
def test_a_scale_that_makes_no_sense_is_refused(more: dict, sentence: str):
    with pytest.raises(ConfigError, match=sentence):
        scaler(**more)
