"""Samples of BERT and T5: what they hold, what they hide, and what the cache keeps."""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.core.config.errors import ConfigError, DataError
from megatron.core.datasets import helpers, helpers_numpy
from megatron.core.datasets.bert_dataset import (
    BERTMaskedWordPieceDataset,
    MockBERTMaskedWordPieceDataset,
)
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.masking import SpanLengths, Words, choose_spans, positions_of
from megatron.core.datasets.t5_dataset import MockT5MaskedWordPieceDataset, T5MaskedWordPieceDataset
from megatron.core.datasets.utils import Split
from megatron.training.tokenizer.null import _NullTokenizer
from tests.unit.datasets.masked_common import (
    FIRST_CONTINUATION,
    WordPieces,
    bert_config,
    bert_dataset,
    corpus,
    t5_config,
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


def original_of(item: dict[str, Any]) -> list[int]:
    """The text of a T5 sample before spans were taken out."""
    said: dict[int, list[int]] = {}
    for token in item["labels"][item["loss_mask"] > 0][:-1].tolist():
        if token in IDS.additional_special_tokens_ids:
            said[token] = []
        else:
            said[list(said)[-1]].append(token)
    whole: list[int] = []
    for token in item["text_enc"][item["enc_mask"] > 0].tolist():
        whole += said.get(token, [token])
    return whole


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
            expected = helpers_numpy.build_mapping(*request, least)
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
        monkeypatch.setattr(helpers.importlib, "import_module", lambda name: helpers_numpy)
        monkeypatch.setattr(helpers, "why_missing", lambda name: None)
        assert helpers._compiled.__wrapped__() is None
        assert "python setup.py build_ext --inplace" in caplog.text


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
        assert set(files) == {f"{stem}-description.txt", f"{stem}-sample_index.npy"}
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
        assert "1 have one of more than 512 tokens" in caplog.text


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
        made._vocab_size = 300
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


@pytest.mark.feature("Data: T5 samples: spans of text taken out, a sentinel for each, in order")
class TestT5:
    def test_encoder_and_decoder_together_are_the_text(self, prefix: str) -> None:
        made = t5_dataset(prefix)
        data = IndexedDataset(prefix)
        for i, (first, end, target) in enumerate(made.sample_index.tolist()):
            item = made[i]
            whole = np.concatenate([data[n] for n in range(first, end)])
            assert original_of(item) == whole[:target].tolist()
            assert item["truncated"] == int(len(whole) > target)

    def test_sentinels_come_in_the_order_of_the_tokenizer(self, prefix: str) -> None:
        backwards = WordPieces()
        backwards.additional_special_tokens_ids = list(range(999, 959, -1))
        made = t5_dataset(prefix, tokenizer=backwards)
        for i in range(len(made)):
            item = made[i]
            for key in ("text_enc", "labels"):
                found = item[key][item[key] >= 960].tolist()
                assert found == backwards.additional_special_tokens_ids[: len(found)]
                assert found

    def test_the_decoder_reads_its_labels_one_step_late(self, prefix: str) -> None:
        made = t5_dataset(prefix)
        for i in range(len(made)):
            item = made[i]
            n = int(item["loss_mask"].sum())
            assert item["text_dec"][0] == IDS.bos
            assert item["text_dec"][1:n].tolist() == item["labels"][: n - 1].tolist()
            assert item["labels"][n - 1] == IDS.eos
            assert (item["labels"][n:] == -1).all()
            assert (item["text_dec"][n:] == IDS.pad).all()
            assert (
                item["dec_mask"].tolist() == item["loss_mask"].tolist() == [1] * n + [0] * (48 - n)
            )
            assert (item["text_enc"] != IDS.pad).tolist() == (item["enc_mask"] > 0).tolist()

    def test_the_rate_of_hidden_tokens_is_the_one_asked_for(self, prefix: str) -> None:
        made = t5_dataset(prefix, masking_do_full_word=False)
        for i in range(len(made)):
            item = made[i]
            num_text = len(original_of(item))
            num_said = int((item["labels"] < 960).sum() - (item["loss_mask"] == 0).sum()) - 1
            assert num_said == max(1, round(num_text * 0.15))

    def test_a_short_decoder_hides_less(self, prefix: str) -> None:
        made = t5_dataset(prefix, sequence_length_decoder=8)
        used = [int(made[i]["loss_mask"].sum()) for i in range(len(made))]
        assert max(used) == 8

    def test_too_few_sentinels_are_told_with_the_cure(self, prefix: str) -> None:
        few = WordPieces()
        few.additional_special_tokens_ids = few.additional_special_tokens_ids[:3]
        with pytest.raises(ConfigError, match=r"gives 3 sentinels.*--vocab-extra-ids 100"):
            t5_dataset(prefix, tokenizer=few)

    def test_a_tokenizer_without_bos_begins_with_padding(self, prefix: str) -> None:
        class Published(WordPieces):
            @property
            def bos(self) -> int:  # type: ignore[override]
                raise AttributeError("bos")

        assert t5_dataset(prefix, tokenizer=Published())[0]["text_dec"][0] == IDS.pad

    def test_made_up_samples_count_upwards(self) -> None:
        made = made_up(MockT5MaskedWordPieceDataset, t5_config(**MOCK))
        first = made._sentinels.min()
        assert first == 100 - 3 - len(made._sentinels) + 1
        for i in range(40):
            item = made[i]
            sentinels = set(item["labels"].tolist()) & set(range(first, 98))
            assert len(sentinels) == int(
                (item["text_enc"] >= first).sum() - (item["enc_mask"] == 0).sum()
            )

    def test_masks_hide_the_encoders_padding(self) -> None:
        padding = torch.tensor([[1, 1, 0], [1, 1, 1]])
        masks = T5MaskedWordPieceDataset.config_attention_mask(padding, padding, padding, padding)
        assert masks[0].tolist() == [[[[False, False, True]]], [[[False] * 3]]]
        assert masks[1] is None
        assert masks[2] is masks[0]


MOCK: dict[str, Any] = {"blend": None, "split": None, "tokenizer": _NullTokenizer(100)}


def made_up(kind: Any, config: Any) -> Any:
    """40 made-up training samples."""
    source = kind.build_low_level_dataset(None, config)
    return kind(source, None, np.arange(3, dtype=np.int32), 40, Split.train, config)


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
            weights = SpanLengths(longest=4, favours_long=True).weights()
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
            spans = choose_spans(words, budget, SpanLengths(longest=3).weights(), random)
            assert len(positions_of(spans)) == budget

    def test_limits_on_spans_and_on_what_is_said_are_kept(self) -> None:
        words = Words.of(np.zeros(200, np.int64), None)
        random, weights = np.random.default_rng(2), SpanLengths(longest=3).weights()
        assert len(choose_spans(words, 100, weights, random, most_spans=5)) == 5
        spans = choose_spans(words, 100, weights, random, most_with_marks=30)
        assert 28 <= len(spans) + len(positions_of(spans)) <= 30

    def test_lengths_are_drawn_by_the_rule_asked_for(self) -> None:
        assert SpanLengths(longest=3).weights() == pytest.approx([6 / 11, 3 / 11, 2 / 11])
        longer = SpanLengths(longest=3, favours_long=True).weights()
        assert longer == pytest.approx([2 / 11, 3 / 11, 6 / 11])
        geometric = SpanLengths(longest=3, is_geometric=True).weights()
        assert geometric == pytest.approx([0.2, 0.16, 0.64])
        words = Words.of(np.zeros(100_000, np.int64), None)
        random = np.random.default_rng(3)
        spans = choose_spans(words, 9_000, SpanLengths(longest=3).weights(), random)
        sizes = np.bincount([end - first for first, end in spans], minlength=4)[1:]
        assert sizes / sizes.sum() == pytest.approx([6 / 11, 3 / 11, 2 / 11], abs=0.05)


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


def test_t5_config_names_what_cannot_be() -> None:
    with pytest.raises(ConfigError, match="--decoder-seq-length 2"):
        t5_config(sequence_length_decoder=2)
    with pytest.raises(ConfigError, match="masking_do_permutation"):
        t5_config(masking_do_permutation=True)
