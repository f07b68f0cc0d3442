"""Samples of BERT and T5: what they hold, what they hide, and what the cache keeps."""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.core.config.errors import ConfigError, DataError
from megatron.core.datasets import helpers
from megatron.core.datasets.bert_dataset import (
    BERTMaskedWordPieceDataset,
    MockBERTMaskedWordPieceDataset,
)
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.indexed_dataset import IndexedDataset
from tests.support.masked_samples import (
    FIRST_CONTINUATION,
    MOCK,
    WordPieces,
    bert_config,
    bert_dataset,
    corpus,
    made_up,
    t5_dataset,
    write_sentences,
)

IDS = WordPieces()
KINDS = {"bert": bert_dataset, "t5": t5_dataset}


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return corpus(tmp_path / "data")


def text_of(item: dict[str, Any]) -> np.ndarray:
    """The tokens of a BERT sample before any was hidden, padding left out."""
    whole = np.where(item["labels"] >= 0, item["labels"], item["text"])
    return whole[item["padding_mask"] > 0]


class TestCache:
    @pytest.mark.parametrize("kind", KINDS)
    def test_names_and_description_are_those_of_the_reference(
        self, kind: str, prefix: str, tmp_path: Path
    ) -> None:
        made = KINDS[kind](prefix, num_samples=50, path_to_cache=str(tmp_path / "cache"))
        wanted: dict[str, Any] = {
            "class": type(made).__name__,
            "dataset_path": prefix,
            "num_samples": 50,
            "index_split": "train",
            "random_seed": 1234,
            "sequence_length": 128,
            "split": "1",
            "split_matrix": [[0, 1.0], None, None],
            "tokenizer": IDS.unique_identifiers,
            "masking_probability": 0.15,
            "short_sequence_probability": 0.1,
            "masking_max_ngram": 3 if kind == "bert" else 10,
            "masking_do_full_word": True,
            "masking_do_permutation": False,
            "masking_use_longer_ngrams": False,
            "masking_use_geometric_distribution": kind == "t5",
        }
        wanted |= {"classification_head": True} if kind == "bert" else {}
        wanted |= {"sequence_length_decoder": 48} if kind == "t5" else {}
        text = json.dumps(wanted, indent=4)
        stem = f"{hashlib.md5(text.encode()).hexdigest()}-{type(made).__name__}"
        files = {path.name: path for path in (tmp_path / "cache").iterdir()}
        names = ("crc.json", "description.txt", "sample_index.npy")
        assert set(files) == {f"{stem}-{name}" for name in names}
        assert files[f"{stem}-description.txt"].read_text() == text
        rows = np.load(files[f"{stem}-sample_index.npy"])
        assert rows.dtype == np.uint32
        assert len(made) == len(rows) >= 50

    def test_a_cache_is_read_again_and_one_of_other_data_is_not(
        self, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first = bert_dataset(prefix)
        rows = first.sample_index.copy()
        with monkeypatch.context() as patch:
            patch.setattr(helpers, "build_mapping", lambda *_: pytest.fail("built"))
            assert (bert_dataset(prefix).sample_index == rows).all()
        corpus(tmp_path / "data", num_documents=5, seed=3)
        assert bert_dataset(prefix).sample_index[:, 1].max() == len(IndexedDataset(prefix))

    def test_splits_are_made_of_documents(self, prefix: str) -> None:
        asked = bert_config(prefix, split="60,20,20")
        sets = BlendedMegatronDatasetBuilder(
            BERTMaskedWordPieceDataset, [None] * 3, lambda: True, asked
        ).build()
        starts = IndexedDataset(prefix).document_indices[[0, 24, 32, 40]].tolist()
        for made, low, high in zip(sets, starts, starts[1:], strict=False):
            rows = made.sample_index  # type: ignore[union-attr]
            assert (rows[:, 0].min(), rows[:, 1].max()) == (low, high)

    def test_data_that_gives_nothing_says_why(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        single = write_sentences(tmp_path / "single", [[40], [30], [600]])
        with pytest.raises(DataError, match=r"3 of 3 documents have fewer than 2.*--split-sent"):
            bert_dataset(single)
        with caplog.at_level(logging.WARNING):
            assert len(t5_dataset(single)) == 2
        assert (
            "1 of 3 documents have fewer than 1 sentences, or one of more than 512" in caplog.text
        )


class TestEverySample:
    @pytest.mark.parametrize("kind", KINDS)
    def test_it_depends_on_seed_and_number_alone(self, kind: str, prefix: str) -> None:
        made, again = KINDS[kind](prefix, 200), KINDS[kind](prefix, 200)
        numbers = list(range(30))
        forward = [made[i] for i in numbers]
        backward = [again[i] for i in reversed(numbers)][::-1]
        for a, b in zip(forward, backward, strict=True):
            assert a.keys() == b.keys()
            assert all(np.array_equal(a[key], b[key]) for key in a)
        other = KINDS[kind](prefix, 200, random_seed=4)
        assert any(
            not np.array_equal(a["labels"], other[i]["labels"]) for i, a in enumerate(forward)
        )

    @pytest.mark.parametrize("kind", KINDS)
    def test_filler_has_no_loss(self, kind: str, prefix: str) -> None:
        made = KINDS[kind](prefix)
        assert made[None]["loss_mask"].sum() == 0
        assert made[0]["loss_mask"].sum() > 0
        with pytest.raises(IndexError, match="of"):
            made[len(made)]

    @pytest.mark.parametrize("kind", KINDS)
    def test_an_id_outside_the_vocabulary_is_named(self, kind: str, prefix: str) -> None:
        small = WordPieces()
        small.vocab_size = 962
        small.vocab = {t: i for t, i in small.vocab.items() if i < 962}
        small.additional_special_tokens_ids = list(range(10, 50))
        made = KINDS[kind](prefix, tokenizer=small)
        small.vocab_size = 300
        with pytest.raises(DataError, match="lies outside the vocabulary of 300"):
            list(map(made.__getitem__, range(len(made))))


@pytest.mark.feature("Data: BERT samples: whole words hidden in n-grams, pairs in or out of order")
class TestBert:
    def test_parts_are_runs_of_sentences_in_or_out_of_order(self, prefix: str) -> None:
        made = bert_dataset(prefix, short_sequence_probability=0.0, sequence_length=512)
        data, swapped = IndexedDataset(prefix), []
        for i, (first, end, _) in enumerate(made.sample_index.tolist()):
            item = made[i]
            text, types = text_of(item), item["types"][item["padding_mask"] > 0]
            assert text[0] == IDS.cls
            cut = int(np.argmax(types)) - 1
            a, b = text[1:cut].tolist(), text[cut + 1 : -1].tolist()
            assert (text[cut], text[-1]) == (IDS.sep, IDS.sep)
            assert types.tolist() == [0] * (cut + 1) + [1] * (len(text) - cut - 1)
            assert item["truncated"] == 0
            whole = np.concatenate([data[i] for i in range(first, end)]).tolist()
            assert whole == (b + a if item["is_random"] else a + b)
            starts = np.cumsum([len(data[i]) for i in range(first, end)]).tolist()
            assert len(b if item["is_random"] else a) in starts
            swapped.append(item["is_random"])
        assert 0.2 < np.mean(swapped) < 0.8

    def test_too_much_text_is_cut_from_the_longer_part(self, prefix: str) -> None:
        made = bert_dataset(prefix, sequence_length=24)
        items = [made[i] for i in range(len(made))]
        assert sum(item["truncated"] for item in items) > len(items) // 2
        for item, target in zip(items, made.sample_index[:, 2].tolist(), strict=True):
            num_text = int(item["padding_mask"].sum()) - 3
            assert num_text <= target <= 21
            assert num_text == target or not item["truncated"]
            assert len(item["text"]) == 24

    def test_without_the_head_a_sample_is_one_part(self, prefix: str) -> None:
        made = bert_dataset(prefix, classification_head=False)
        for i in range(20):
            item = made[i]
            text = text_of(item)
            assert item["types"].sum() == item["is_random"] == 0
            assert (text == IDS.sep).nonzero()[0].tolist() == [len(text) - 1]

    def test_the_rate_of_hidden_tokens_is_the_one_asked_for(self, prefix: str) -> None:
        for probability in (0.15, 0.4):
            made = bert_dataset(
                prefix, 200, masking_probability=probability, masking_do_full_word=False
            )
            for i in range(50):
                item = made[i]
                num_text = int(item["padding_mask"].sum()) - 3
                assert item["loss_mask"].sum() == max(1, round(num_text * probability))
                assert ((item["labels"] >= 0) == (item["loss_mask"] > 0)).all()
                assert not np.isin(item["labels"], (IDS.cls, IDS.sep, IDS.pad)).any()

    def test_eighty_ten_ten(self, prefix: str) -> None:
        made = bert_dataset(prefix, 3000)
        items = [made[i] for i in range(1500)]
        seen = np.concatenate([item["text"][item["loss_mask"] > 0] for item in items])
        meant = np.concatenate([item["labels"][item["loss_mask"] > 0] for item in items])
        assert len(seen) > 10000
        assert abs((seen == IDS.mask).mean() - 0.8) < 0.01
        assert abs((seen == meant).mean() - 0.1) < 0.01

    def test_whole_words_are_hidden_or_shown(self, prefix: str) -> None:
        made = bert_dataset(prefix)
        for i in range(len(made)):
            item = made[i]
            text, hidden = text_of(item), item["loss_mask"] > 0
            for at in range(2, len(text)):
                continues = FIRST_CONTINUATION <= text[at] < 960
                if continues and text[at - 1] > IDS.mask and at not in self._starts(made, i):
                    assert hidden[at] == hidden[at - 1]

    @staticmethod
    def _starts(made: BERTMaskedWordPieceDataset, i: int) -> set[int]:
        """Where sentences may begin: a piece there continues nothing."""
        first, end, _ = made.sample_index[i].tolist()
        text = text_of(made[i]).tolist()
        heads = {tuple(made.dataset[n][:3].tolist()) for n in range(first, end)}
        return {at for at in range(len(text)) if tuple(text[at : at + 3]) in heads}

    def test_permuted_tokens_stay_in_the_sample_and_are_predicted(self, prefix: str) -> None:
        plain = bert_dataset(prefix, masking_do_full_word=False)
        made = bert_dataset(prefix, masking_do_full_word=False, masking_do_permutation=True)
        num_moved = 0
        for i in range(30):
            a, b = plain[i], made[i]
            assert (text_of(a) == text_of(b)).all()
            only = (b["loss_mask"] > 0) & (a["loss_mask"] == 0)
            assert abs(int(only.sum()) - int(a["loss_mask"].sum())) <= 1
            assert sorted(b["text"][only]) == sorted(b["labels"][only])
            num_moved += int((b["text"][only] != b["labels"][only]).sum())
        assert num_moved > 100

    def test_made_up_samples_count_upwards_through_both_parts(self) -> None:
        made = made_up(MockBERTMaskedWordPieceDataset, bert_config(**MOCK))
        assert len(made) == 40
        for i in range(40):
            item = made[i]
            text, types = text_of(item), item["types"][item["padding_mask"] > 0]
            a, b = text[types == 0][1:-1], text[types == 1][:-1]
            steps = set(np.diff(a).tolist()) | set(np.diff(b).tolist())
            assert steps <= {1, 1 - 97}  # ids 97 to 100 are special


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"masking_probability": 0.0}, "--mask-prob 0.0"),
        ({"short_sequence_probability": 1.5}, "--short-seq-prob 1.5"),
        ({"masking_max_ngram": 0}, "masking_max_ngram 0"),
        (
            {"masking_use_longer_ngrams": True, "masking_use_geometric_distribution": True},
            "two rules",
        ),
    ],
)
def test_a_rule_that_hides_nothing_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        bert_config(**changes)
