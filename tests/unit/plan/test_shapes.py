"""Results that are made from remembered shapes are those of the operation itself."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest
import torch

from megatron.training.planning import tracing
from megatron.training.planning.tracing import KnownShapes, without_compiler

aten: Any = torch.ops.aten


def _meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (aten.mm.default, (_meta(3, 4), _meta(4, 5))),
        (aten.add.Tensor, (_meta(3, 4, dtype=torch.bfloat16), _meta(4))),
        (aten.cat.default, ([_meta(3, 4), _meta(2, 4)],)),
        (aten.topk.default, (_meta(3, 8), 2)),
        (aten.mul.Scalar, (_meta(3, dtype=torch.int64), 2)),
        (aten.mul.Scalar, (_meta(3, dtype=torch.int64), 2.0)),
        (aten.gelu_backward.default, (_meta(3, 4).t(), _meta(4, 3))),
    ],
)
def test_the_second_result_is_like_the_first(func: Any, args: tuple[Any, ...]) -> None:
    shapes = KnownShapes()
    results = [func(*args), *(shapes.result(func, args, {}) for _ in range(2))]
    parts = [r if isinstance(r, tuple) else (r,) for r in results]
    seen = [[(t.shape, t.stride(), t.dtype, t.device) for t in part] for part in parts]
    assert seen[0] == seen[1] == seen[2]
    assert parts[1][0].untyped_storage()._cdata != parts[2][0].untyped_storage()._cdata


def test_whole_and_fractional_factors_are_told_apart() -> None:
    shapes, x = KnownShapes(), _meta(3, dtype=torch.int64)
    found = [shapes.result(aten.mul.Scalar, (x, factor), {}).dtype for factor in (2, 2.0)]
    assert found == [torch.int64, torch.float32]


def test_views_and_results_in_place_keep_their_storage() -> None:
    shapes, x = KnownShapes(), _meta(3, 4)
    for func, args in (
        (aten.t.default, (x,)),
        (aten._unsafe_view.default, (x, [12])),
        (aten.add_.Tensor, (x, x)),
    ):
        for _ in range(2):
            result = shapes.result(func, args, {})
            assert result.untyped_storage()._cdata == x.untyped_storage()._cdata


def test_tensors_with_memory_are_computed() -> None:
    shapes = KnownShapes()
    for value in (1.0, 2.0):
        x = torch.full((2,), value)
        assert shapes.result(aten.add.Tensor, (x, x), {}).tolist() == [2 * value] * 2
        assert shapes.result(aten.mul_.Tensor, (x, x), {}).tolist() == [value * value] * 2


def test_a_gemm_that_adds_in_fp32_returns_its_output() -> None:
    """torch 2.11 has it for a GPU only."""
    total = _meta(3, 3)
    x = _meta(3, 3, dtype=torch.bfloat16)
    func = aten.addmm.dtype_out
    args = (total, x, x, torch.float32)
    assert KnownShapes().result(func, args, {"out": total}) is total


def test_a_stand_in_of_a_module_ends_where_another_name_is_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tracing, "_OF_INTEGERS", {"colorsys": {"rgb_to_hsv": None}})
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    with without_compiler():
        stand_in = importlib.import_module("colorsys")
        assert stand_in.rgb_to_hsv is None
        assert stand_in.ONE_THIRD == 1 / 3
        assert importlib.import_module("colorsys").rgb_to_hsv is not None
    monkeypatch.delitem(sys.modules, "colorsys")
    with without_compiler():
        assert importlib.import_module("colorsys").rgb_to_hsv is None
    assert importlib.import_module("colorsys").rgb_to_hsv is not None
