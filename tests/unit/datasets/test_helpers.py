"""Index arrays: their definition, and C++ against numpy on many shapes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from megatron.core import optional
from megatron.core.datasets import helpers

CPP = "megatron.core.datasets.helpers_cpp"


@pytest.fixture
def cpp() -> ModuleType:
    if not optional.available(CPP):
        pytest.skip("the compiled helper is not installed: python setup.py build_ext --inplace")
    return optional.require(CPP, "tests")


def in_numpy(function: Callable[..., Any], *arguments: object) -> Any:
    """Return the result of ``function`` without the compiled helper."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(helpers, "_compiled", lambda: None)
        return function(*arguments)


def by_walking(
    sizes: np.ndarray, order: np.ndarray, length: int, drop_last: bool, extra: bool
) -> list[tuple[int, int]]:
    """Where samples start, token by token."""
    tokens = [(k, offset) for k, d in enumerate(order) for offset in range(sizes[d])]
    usable = max(len(tokens) - extra, 0)
    count = usable // length if drop_last else -(-usable // length)
    rows = [(0, 0)]
    for sample in range(1, count + 1):
        next_token = min(sample * length, usable)
        if extra:
            rows.append(tokens[next_token])
        else:
            document, offset = tokens[next_token - 1]
            rows.append((document, offset + 1))
    return rows


def random_request(random: np.random.Generator) -> tuple:
    documents = int(random.integers(1, 30))
    sizes = random.integers(0, random.integers(2, 40), documents).astype(np.int32)
    epochs = int(random.integers(1, 4))
    order = np.tile(np.arange(documents, dtype=np.int32), epochs)
    random.shuffle(order)
    drop_last, extra = (bool(x) for x in random.integers(2, size=2))
    return sizes, order, int(random.integers(1, 50)), epochs, int(sizes.sum()), drop_last, extra


def test_boundaries_are_those_of_a_walk_over_all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    for _ in range(300):
        monkeypatch.setattr(helpers, "_DOCUMENTS_AT_ONCE", int(random.integers(1, 20)))
        request = random_request(random)
        sizes, order, length, _, _, drop_last, extra = request
        built = in_numpy(helpers.build_sample_idx, *request)
        expected = by_walking(sizes, order, length, drop_last, extra)
        assert built.tolist() == [list(row) for row in expected], request


def test_compiled_boundaries_equal_those_of_numpy(cpp: ModuleType) -> None:
    random = np.random.default_rng(1)
    for _ in range(2000):
        request = random_request(random)
        expected = in_numpy(helpers.build_sample_idx, *request)
        for name in ("int32", "int64"):
            built = getattr(cpp, f"build_sample_idx_{name}")(*request[:-1], int(request[-1]))
            assert built.dtype == name
            assert np.array_equal(built, expected), request


@pytest.mark.parametrize("numpy_only", [True, False])
def test_offsets_beyond_two_gigatokens_take_int64(
    numpy_only: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if numpy_only:
        monkeypatch.setattr(helpers, "_compiled", lambda: None)
    sizes = np.array([5, 2**31 - 1], np.int32)
    order = np.arange(2, dtype=np.int32)
    arguments = (sizes, order, 2**30, 1, int(sizes.sum(dtype=np.int64)))
    assert helpers.build_sample_idx(*arguments).dtype == np.int32
    many = np.zeros(1, np.int32)
    assert helpers.build_sample_idx(many, many, 4, 1, 0).tolist() == [[0, 0]]
    rows = helpers.build_sample_idx(*arguments)
    assert rows.tolist() == [[0, 0], [1, 2**30 - 5], [1, 2**31 - 5]]


@pytest.mark.parametrize("numpy_only", [True, False])
def test_impossible_requests_are_refused(numpy_only: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if numpy_only:
        monkeypatch.setattr(helpers, "_compiled", lambda: None)
    sizes, order = np.array([3, 3], np.int32), np.array([0, 1], np.int32)
    with pytest.raises(ValueError, match="fewer tokens than the epochs ask for"):
        helpers.build_sample_idx(sizes, order, 2, 1, 100)
    with pytest.raises(ValueError, match="at least 1"):
        helpers.build_sample_idx(sizes, order, 0, 1, 6)
    with pytest.raises(IndexError):
        helpers.build_sample_idx(sizes, np.array([0, 2], np.int32), 2, 1, 6)


def test_wrong_array_types_are_not_converted_behind_the_back(cpp: ModuleType) -> None:
    with pytest.raises(TypeError):
        cpp.build_sample_idx_int32(np.array([3]), np.array([0], np.int32), 2, 1, 3, True, 1)
    short = np.zeros(2, np.int16), np.zeros(2, np.int64)
    with pytest.raises(ValueError, match="shorter than its size"):
        cpp.build_blending_indices(*short, np.ones(1), 1, 3, False)


class TestBlends:
    def blend(self, weights: np.ndarray, size: int, module: ModuleType) -> tuple:
        chosen, place = np.zeros(size, np.int16), np.zeros(size, np.int64)
        module.build_blending_indices(chosen, place, weights, len(weights), size, False)
        return chosen, place

    def exhaust(self, sizes: np.ndarray, module: ModuleType) -> tuple:
        total = int(sizes.sum())
        chosen, place = np.zeros(total, np.int16), np.zeros(total, np.int64)
        module.build_exhaustive_blending_indices(chosen, place, sizes, len(sizes))
        return chosen, place

    def test_the_one_furthest_behind_is_next_and_ties_go_to_the_first(self) -> None:
        chosen, place = in_numpy(self.blend, np.array([0.5, 0.25, 0.25]), 8, helpers)
        assert chosen.tolist() == [0, 1, 2, 0, 0, 1, 2, 0]
        assert place.tolist() == [0, 0, 0, 1, 2, 1, 1, 3]

    def test_compiled_blends_equal_those_of_numpy(self, cpp: ModuleType) -> None:
        random = np.random.default_rng(2)
        for _ in range(150):
            weights = random.random(random.integers(1, 20)) + 1e-9
            weights /= weights.sum()
            size = int(random.integers(0, 400))
            for ours, theirs in zip(
                self.blend(weights, size, cpp),
                in_numpy(self.blend, weights, size, helpers),
                strict=True,
            ):
                assert np.array_equal(ours, theirs)
            sizes = random.integers(0, 40, len(weights)) + (np.arange(len(weights)) == 0)
            for ours, theirs in zip(
                self.exhaust(sizes, cpp), in_numpy(self.exhaust, sizes, helpers), strict=True
            ):
                assert np.array_equal(ours, theirs)

    def test_shares_are_exact_to_one_sample_at_every_point_of_two_datasets(self) -> None:
        random = np.random.default_rng(3)
        for _ in range(50):
            weight = random.random()
            chosen, _ = self.blend(np.array([weight, 1 - weight]), 300, helpers)
            drawn = np.cumsum(chosen == 0)
            assert np.abs(drawn - weight * np.arange(1, 301)).max() <= 1

    def test_every_dataset_is_taken_once_from_start_to_end_without_weights(self) -> None:
        sizes = np.array([5, 1, 0, 9])
        chosen, place = self.exhaust(sizes, helpers)
        for dataset, size in enumerate(sizes):
            assert place[chosen == dataset].tolist() == list(range(size))


class TestShuffle:
    @pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.int64])
    def test_the_order_and_the_state_after_are_those_of_numpy(
        self, cpp: ModuleType, dtype: type
    ) -> None:
        ours, theirs = np.random.RandomState(5), np.random.RandomState(5)
        for length in (0, 1, 2, 3, 63, 64, 65, 623, 624, 625, 1000, 65537):
            mine, other = np.arange(length, dtype=dtype), np.arange(length, dtype=dtype)
            helpers.shuffle(mine, ours)
            theirs.shuffle(other)
            assert np.array_equal(mine, other), length
        assert ours.randn() == theirs.randn()

    def test_numpy_stands_in(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(helpers, "_compiled", lambda: None)
        values = np.arange(100)
        expected = values.copy()
        helpers.shuffle(values, np.random.RandomState(1))
        np.random.RandomState(1).shuffle(expected)
        assert np.array_equal(values, expected)


def test_which_helper_is_used_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(helpers, "why_missing", lambda _: "helpers_cpp is not installed")
    helpers._compiled.cache_clear()
    with caplog.at_level(logging.INFO):
        assert helpers._compiled() is None
        assert helpers._compiled() is None
    helpers._compiled.cache_clear()
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1
    assert "helpers_cpp is not installed" in told[0]
