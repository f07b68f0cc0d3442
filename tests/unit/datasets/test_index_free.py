"""The index-free order: samples, epochs, blends, and what opening a data set reads."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.core.config.errors import DataError
from megatron.core.datasets import index_free
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.datasets.index_free import BlendOrder, DocumentOrder, Permutation
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.indexed_format import HEADER, SequenceIndex
from tests.support.dataset_files import Tokenizer, config, numbered, write

LENGTHS = [int(n) for n in np.random.default_rng(3).integers(1, 40, 200)]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_free, "_BLOCK", 16)


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    """200 documents of 1 to 39 tokens, no token id twice."""
    return write(tmp_path / "data", numbered(LENGTHS), np.int32)


def build(sizes: list[int | None], **changes: Any) -> list[Any]:
    asked = config(index_free=True, tokenizer=Tokenizer(10_000), **changes)
    return BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, asked).build()


def tokens_of(data: Any, i: int) -> list[int]:
    """The tokens of a sample and the label of the last one."""
    sample = data[i]
    return [*sample["tokens"].tolist(), int(sample["labels"][-1])]


class TestPermutation:
    @pytest.mark.parametrize("length", [1, 2, 3, 16, 17, 1000])
    def test_each_number_occurs_once(self, length: int) -> None:
        order = Permutation(length, [1, 2])
        assert sorted(order[i] for i in range(length)) == list(range(length))

    def test_it_has_no_elements_outside(self) -> None:
        with pytest.raises(IndexError):
            Permutation(5, [0])[5]

    def test_neighbors_and_places_are_not_correlated(self) -> None:
        length = 20_000
        order = np.array([Permutation(length, [7, 0])[i] for i in range(length)])
        limit = 4 / np.sqrt(length)  # four standard deviations of independent numbers
        assert abs(np.corrcoef(order, np.arange(length))[0, 1]) < limit
        assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < limit
        steps = np.diff(order) % length  # are uniform: their 20 bins are equally full
        counts = np.histogram(steps, 20, (0, length))[0]
        expected = len(steps) / 20
        assert ((counts - expected) ** 2 / expected).sum() < 50  # chi-square of 19, p < 0.001

    def test_other_keys_give_other_orders(self) -> None:
        orders = {tuple(Permutation(50, [1, key])[i] for i in range(50)) for key in range(20)}
        assert len(orders) == 20


class TestSamples:
    def test_an_epoch_holds_each_token_once(self, prefix: str) -> None:
        train, _, _ = build([None, 0, 0], blend=([prefix], None))
        starts = [token for i in range(len(train)) for token in tokens_of(train, i)[:-1]]
        assert len(starts) == len(set(starts)) == (sum(LENGTHS) - 1) // 8 * 8

    def test_samples_are_cut_from_documents_that_are_shuffled_in_blocks(self, prefix: str) -> None:
        train, _, _ = build([None, 0, 0], blend=([prefix], None))
        follows = {sample[0]: sample for i in range(len(train)) if (sample := tokens_of(train, i))}
        labels = {sample[-1] for sample in follows.values()}
        samples = [sample for first, sample in follows.items() if first not in labels]
        assert len(samples) == 1
        while samples[-1][-1] in follows:
            samples.append(follows[samples[-1][-1]])
        stream = [token for sample in samples for token in sample[:-1]]
        assert len(samples) == len(train)
        document_of = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
        documents = [int(document_of[token - 1]) for token in stream]
        changes = [i for i, (a, b) in enumerate(pairwise(documents)) if a != b]
        firsts = np.cumsum([1, *LENGTHS])
        for i in changes:  # complete documents follow one another
            assert stream[i] == firsts[documents[i] + 1] - 1
            assert stream[i + 1] == firsts[documents[i + 1]]
        order = [documents[0], *(documents[i + 1] for i in changes)]
        blocks = [document // 16 for document in order]
        assert len([1 for a, b in pairwise(blocks) if a != b]) == len(set(blocks)) - 1
        assert blocks != sorted(blocks)
        assert any(a > b for a, b in pairwise(order[:5]))

    def test_a_sample_depends_on_its_number_alone(self, prefix: str) -> None:
        wanted = [5, 900, 0, 431, 5]  # of several epochs, in any order
        short, long = (build([n, 0, 0], blend=([prefix], None))[0] for n in (1000, 5000))
        assert all(tokens_of(short, i) == tokens_of(long, i) for i in range(1000))
        again = build([1000, 0, 0], blend=([prefix], None))[0]
        assert [tokens_of(again, i) for i in wanted] == [tokens_of(short, i) for i in wanted]
        assert len(short) == 1000

    def test_epochs_and_seeds_have_other_orders(self, prefix: str) -> None:
        train = build([2000, 0, 0], blend=([prefix], None))[0]
        other = build([2000, 0, 0], blend=([prefix], None), random_seed=7)[0]
        count = (sum(LENGTHS) - 1) // 8
        first = [tokens_of(train, i) for i in range(count)]
        second = [tokens_of(train, i + count) for i in range(count)]
        common = {tuple(s) for s in first} & {tuple(s) for s in second}
        assert len(common) < count / 4  # a long document may be cut at the same places
        assert first != [tokens_of(other, i) for i in range(count)]

    def test_splits_are_disjoint_and_validation_may_keep_its_rest(self, prefix: str) -> None:
        datasets = build(
            [None] * 3,
            blend=([prefix], None),
            split="80,10,10",
            drop_last_partial_validation_sequence=False,
        )
        seen = [
            {token for i in range(len(data)) for token in data[i]["tokens"].tolist()} - {0}
            for data in datasets
        ]
        assert not seen[0] & seen[1]
        assert not seen[2] & (seen[0] | seen[1])
        valid = datasets[1]
        tokens = sum(LENGTHS[160:180])
        assert len(valid) == -(-(tokens - 1) // 8)
        losses = sum(int(valid[i]["loss_mask"].sum()) for i in range(len(valid)))
        assert losses == tokens - 1

    def test_nothing_is_written_and_arrays_are_not_read_at_opening(
        self, prefix: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def never(*_: object) -> None:
            raise AssertionError("the complete .idx is read")

        monkeypatch.setattr(SequenceIndex, "check_arrays", never)
        monkeypatch.setattr(SequenceIndex, "data", never)
        files = sorted(Path(prefix).parent.rglob("*"))
        train = build([100, 0, 0], blend=([prefix], None))[0]
        tokens_of(train, 3)
        assert sorted(Path(prefix).parent.rglob("*")) == files

    def test_damage_is_reported_where_it_is_read(self, prefix: str) -> None:
        with open(f"{prefix}.idx", "r+b") as file:
            file.seek(HEADER.size + 4 * 33)
            file.write(np.int32(1_000_000).tobytes())
        train = build([None, 0, 0], blend=([prefix], None))[0]
        with pytest.raises(DataError, match=r"lengths of sequences 32 to 48 do not match"):
            list(map(train.__getitem__, range(len(train))))

    def test_too_few_tokens_are_refused(self, tmp_path: Path) -> None:
        few = write(tmp_path / "few", [[1, 2, 3]])
        with pytest.raises(DataError, match="holds 3 tokens, too few for one sample of 8"):
            build([None, 0, 0], blend=([few], None))

    def test_order_of_a_range(self, prefix: str) -> None:
        order = DocumentOrder(IndexedDataset(prefix), 50, 60, length=8, extra=1, seed=1)
        pieces = [piece for i in range(order.samples_per_epoch) for piece in order.pieces(i)]
        assert {sequence for sequence, _, _ in pieces} <= set(range(50, 60))
        assert sum(count for *_, count in pieces) == 9 * order.samples_per_epoch


class TestBlends:
    @pytest.mark.parametrize(
        ("weights", "period"),
        [([1, 2, 3], None), ([0.5] + [0.0005] * 1000, None), ([10, 20, 5], 35), ([0.3, 0.7], 11)],
    )
    def test_each_source_is_read_in_order_and_has_its_share(
        self, weights: list[float], period: int | None
    ) -> None:
        order = BlendOrder(weights, period)
        size = 3000 if period is None else period
        taken: Counter[int] = Counter()
        for i in range(size):
            source, number = order[i]
            assert number == taken[source]
            taken[source] += 1
        for source, weight in enumerate(weights):
            share = size * weight / sum(weights)
            assert order.count(source, size) == taken[source]
            assert abs(taken[source] - share) <= (1 if period else 3)

    def test_the_share_of_many_samples(self) -> None:
        weights = [0.5, 0.25, 0.2, 0.05]
        order = BlendOrder(weights)
        for source, weight in enumerate(weights):
            assert abs(order.count(source, 10**9) - weight * 10**9) < 6

    def test_a_blend_of_files(self, tmp_path: Path) -> None:
        paths = [
            write(tmp_path / name, numbered([9] * 20, first))
            for name, first in (("a", 1), ("b", 201))
        ]
        blend = build([400, 0, 0], blend=(paths, [3.0, 1.0]))[0]
        more = build([4000, 0, 0], blend=(paths, [3.0, 1.0]))[0]
        ids = [blend[i]["dataset_id"] for i in range(400)]
        assert len(blend) == sum(-(-400 * share // 4) for share in (3, 1))
        assert abs(Counter(ids)[0] - 300) <= 2
        assert [more[i]["dataset_id"] for i in range(400)] == ids
        assert all(tokens_of(more, i) == tokens_of(blend, i) for i in range(400))

    def test_files_without_weights_are_read_once(self, tmp_path: Path) -> None:
        paths = [
            write(tmp_path / "a", numbered([9] * 20)),
            write(tmp_path / "b", numbered([9] * 5, 201)),
        ]
        blend = build([None, 0, 0], blend=(paths, None))[0]
        firsts = [token for i in range(len(blend)) for token in blend[i]["tokens"].tolist()]
        assert len(firsts) == len(set(firsts)) == (179 // 8 + 44 // 8) * 8
