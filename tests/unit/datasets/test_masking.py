"""Sentences cut into samples, and the words of a sample that are hidden."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron.core.datasets import helpers
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.masked_dataset import Words, choose_spans, positions_of, span_weights
from tests.support.masked_samples import corpus
from tests.unit.datasets.test_helpers import in_numpy


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return corpus(tmp_path / "data")


class TestMapping:
    def test_compiled_rows_equal_those_of_numpy(self) -> None:
        random = np.random.default_rng(0)
        for _ in range(300):
            counts = random.integers(0, 8, random.integers(0, 20))
            docs = np.concatenate(([0], np.cumsum(counts)))
            sizes = random.integers(0, random.integers(2, 600), docs[-1]).astype(np.int32)
            request = (
                docs,
                sizes,
                int(random.integers(1, 5)),
                int(random.integers(1, 60)),
                int(random.integers(2, 300)),
                float(random.choice([0, 0.1, 0.3, 1.0])),
                int(random.integers(1 << 32)),
            )
            least = int(random.integers(1, 3))
            built = helpers.build_mapping(*request, False, least)
            expected = in_numpy(helpers.build_mapping, *request, False, least)
            assert built.dtype == expected.dtype == np.uint32
            assert built.tolist() == expected.tolist(), request

    def test_an_epoch_has_every_sentence_once_and_leaves_none_alone(self, prefix: str) -> None:
        data = IndexedDataset(prefix)
        rows = helpers.build_mapping(
            data.document_indices, data.sequence_lengths, 1, 10**9, 61, 0.1, 7, False, 2
        )
        rows = rows[np.argsort(rows[:, 0])].astype(np.int64)
        assert rows[0, 0] == 0
        assert rows[-1, 1] == len(data)
        assert (rows[1:, 0] == rows[:-1, 1]).all()
        assert (rows[:, 1] - rows[:, 0] >= 2).all()
        ends = set(data.document_indices.tolist())
        sums = np.concatenate(([0], np.cumsum(data.sequence_lengths)))
        for first, end, target in rows.tolist():
            is_full = sums[end] - sums[first] >= target
            assert is_full or end in ends
            assert end - 1 == first + 1 or sums[end - 1] - sums[first] < target or end in ends

    def test_short_targets_come_as_often_as_asked(self) -> None:
        docs, sizes = np.arange(0, 40002, 2), np.full(40000, 9, np.int32)
        rows = helpers.build_mapping(docs, sizes, 1, 10**9, 509, 0.1, 3, False, 2)
        targets = rows[:, 2]
        assert targets.min() >= 2
        assert targets.max() == 509
        assert abs((targets < 509).mean() - 0.1) < 0.01

    def test_documents_with_a_sentence_above_512_tokens_are_left_out(self) -> None:
        docs, sizes = np.array([0, 2, 4]), np.array([5, 513, 5, 512], np.int32)
        rows = helpers.build_mapping(docs, sizes, 1, 10**9, 20, 0.0, 1, False, 1)
        assert rows.tolist() == [[2, 4, 20]]

    def test_a_binary_without_the_function_makes_way_for_numpy(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(helpers.importlib, "import_module", lambda name: helpers)
        monkeypatch.setattr(helpers, "why_missing", lambda name: None)
        assert helpers._compiled.__wrapped__() is None
        assert "python setup.py build_ext --inplace" in caplog.text


class TestSpans:
    def test_they_hide_whole_words_of_one_sentence_and_never_overlap(self) -> None:
        random = np.random.default_rng(0)
        for _ in range(200):
            n = int(random.integers(2, 80))
            sentence = np.sort(random.integers(-1, 6, n))
            sentence = random.permutation(np.unique(sentence))[
                np.unique(sentence, return_inverse=True)[1]
            ]
            continues = random.random(n) < 0.4
            words = Words.of(sentence, continues)
            weights = span_weights(4, favors_long=True)
            budget = int(random.integers(1, n + 1))
            spans = choose_spans(words, budget, weights, random)
            hidden = positions_of(spans)
            assert len(set(hidden.tolist())) == len(hidden) <= budget
            assert spans == sorted(spans)
            for first, end in spans:
                assert len(set(sentence[first:end].tolist())) == 1
                assert sentence[first] >= 0
                for edge in (first, end):  # no word is cut
                    if 0 < edge < n and sentence[edge] == sentence[edge - 1]:
                        assert not continues[edge]

    def test_one_word_each_fills_the_budget_exactly(self) -> None:
        words = Words.of(np.zeros(50, np.int64), None)
        random = np.random.default_rng(1)
        for budget in (1, 7, 50):
            spans = choose_spans(words, budget, span_weights(3), random)
            assert len(positions_of(spans)) == budget

    def test_limits_on_spans_and_on_what_is_said_are_kept(self) -> None:
        words = Words.of(np.zeros(200, np.int64), None)
        random, weights = np.random.default_rng(2), span_weights(3)
        assert len(choose_spans(words, 100, weights, random, most_spans=5)) == 5
        spans = choose_spans(words, 100, weights, random, most_with_marks=30)
        assert 28 <= len(spans) + len(positions_of(spans)) <= 30

    def test_lengths_are_drawn_by_the_rule_asked_for(self) -> None:
        assert span_weights(3) == pytest.approx([6 / 11, 3 / 11, 2 / 11])
        longer = span_weights(3, favors_long=True)
        assert longer == pytest.approx([2 / 11, 3 / 11, 6 / 11])
        geometric = span_weights(3, is_geometric=True)
        assert geometric == pytest.approx([0.2, 0.16, 0.64])
        words = Words.of(np.zeros(100_000, np.int64), None)
        random = np.random.default_rng(3)
        spans = choose_spans(words, 9_000, span_weights(3), random)
        sizes = np.bincount([end - first for first, end in spans], minlength=4)[1:]
        assert sizes / sizes.sum() == pytest.approx([6 / 11, 3 / 11, 2 / 11], abs=0.05)
