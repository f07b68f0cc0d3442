"""Small helpers that scripts import."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from megatron.core.utils import (
    PaddedSize,
    StragglerDetector,
    configure_nvtx_profiling,
    divide,
    ensure_divisibility,
    get_attr_wrapped_model,
    get_model_config,
    nvtx_decorator,
    nvtx_range_pop,
    nvtx_range_push,
)
from megatron.training.compat.utils import unwrap_model


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.config = None


def make_wrapped() -> tuple[nn.Module, nn.Module]:
    inner = nn.Linear(1, 1)
    inner.config = SimpleNamespace(num_layers=3)  # type: ignore[assignment]
    return Wrapper(Wrapper(inner)), inner


def test_attributes_are_found_below_wrappers():
    outer, inner = make_wrapped()
    assert get_model_config(outer).num_layers == 3
    assert get_attr_wrapped_model(outer, "config") is None
    assert get_attr_wrapped_model(outer, "in_features") == 1
    assert get_attr_wrapped_model(outer, "in_features", return_model_obj=True) is inner
    with pytest.raises(RuntimeError, match="no module of this model has an attribute 'nothing'"):
        get_attr_wrapped_model(outer, "nothing")


def test_unwrapping_ends_at_the_model():
    outer, inner = make_wrapped()
    assert unwrap_model(outer) is inner
    assert unwrap_model([outer, inner]) == [inner, inner]


def test_a_padded_size_is_a_number_that_remembers():
    size = PaddedSize(128, 100)
    assert (size, size.true_size, size // 2) == (128, 100, 64)
    assert torch.empty(size).shape == (128,)
    assert pickle.loads(pickle.dumps(size)).true_size == 100


def test_the_straggler_detector_lets_everything_pass():
    stimer = StragglerDetector()
    with stimer(bdata=True), stimer:
        pass
    with pytest.raises(ValueError, match="mine"), stimer:
        raise ValueError("mine")


def test_division_without_remainder():
    assert divide(6, 3) == 2
    with pytest.raises(AssertionError, match="7 is not divisible by 2"):
        ensure_divisibility(7, 2)


@nvtx_decorator("decorated")
def compute() -> None:
    nvtx_range_push(suffix="inner")
    torch.ones(2).sum()
    nvtx_range_pop()


def marked_ranges() -> set[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        nvtx_range_push("outer")
        compute()
        nvtx_range_pop("outer")
    return {event.key for event in profile.key_averages()}


def test_ranges_are_marked_if_they_are_switched_on() -> None:
    names = {"outer", "decorated", f"{__name__}.compute.inner"}
    assert not names & marked_ranges()
    configure_nvtx_profiling(True)
    try:
        assert names <= marked_ranges()
        nvtx_range_push("a")
        with pytest.raises(ValueError, match="b is not a, the last range"):
            nvtx_range_pop("b")
        with pytest.raises(ValueError, match="no range has begun"):
            nvtx_range_pop()
    finally:
        configure_nvtx_profiling(False)
