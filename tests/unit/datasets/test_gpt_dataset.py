"""GPT samples: which tokens they hold, what masks say, and what the cache keeps."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.core.config.errors import ConfigError, DataError
from megatron.core.datasets import gpt_dataset, index_cache
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import (
    GPTDataset,
    GPTIndices,
    MockGPTDataset,
    SampleRequest,
    build_indices,
    causal_mask,
    get_ltor_masks_and_position_ids,
)
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megatron.core.datasets.samplers import collate
from megatron.core.datasets.utils import Split
from tests.support.dataset_files import (
    GOLDEN,
    GoldenTokenizer,
    Tokenizer,
    config,
    dataset,
    numbered,
    write,
)


def golden_datasets(cache: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The three splits as the reference's run asked for them, by a relative path."""
    monkeypatch.chdir(GOLDEN)
    asked = config(
        blend=(["text_text_document"], None),
        sequence_length=64,
        split="90,5,5",
        path_to_cache=str(cache),
        tokenizer=GoldenTokenizer(),
    )
    return BlendedMegatronDatasetBuilder(GPTDataset, [80, 32, 16], lambda: True, asked).build()


class TestCache:
    @pytest.mark.feature("Data: index caches equal to Megatron-LM's, names, hashes and bytes")
    def test_names_and_bytes_are_those_of_the_reference(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        golden_datasets(tmp_path, monkeypatch)
        expected = {p.name: p.read_bytes() for p in (GOLDEN / "index_cache").iterdir()}
        ours = {p.name for p in tmp_path.glob("*-crc.json")}
        found = {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.name not in ours}
        assert found == expected
        assert len(ours) == 3

    def test_numpy_gives_the_same_bytes(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(gpt_dataset.helpers, "_compiled", lambda: None)
        self.test_names_and_bytes_are_those_of_the_reference(tmp_path, monkeypatch)

    def test_a_cache_of_the_reference_is_read_and_not_written_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        shutil.copytree(GOLDEN / "index_cache", tmp_path / "cache")

        def never(path: str, array: np.ndarray) -> None:
            raise AssertionError(f"{path} is written again")

        monkeypatch.setattr(index_cache, "save_array", never)
        assert [len(d) for d in golden_datasets(tmp_path / "cache", monkeypatch)] == [
            2149,
            137,
            113,
        ]

    def test_a_cache_below_a_file_is_named_with_the_cure(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(DataError, match="cannot write the index cache .* --data-cache-path"):
            golden_datasets(tmp_path / "file" / "cache", monkeypatch)

    def test_a_loop_ends_behind_the_last_sample(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        *_, small = golden_datasets(tmp_path, monkeypatch)
        assert len(list(small)) == len(small) == 113

    def test_an_unreadable_description_is_built_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        golden_datasets(tmp_path, monkeypatch)
        for description in tmp_path.glob("*-description.txt"):
            description.write_bytes(b"\xff")
        self.test_names_and_bytes_are_those_of_the_reference(tmp_path, monkeypatch)

    @pytest.mark.parametrize("name", ["document_index", "sample_index", "shuffle_index"])
    def test_a_damaged_array_is_built_again(
        self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        shutil.copytree(GOLDEN / "index_cache", tmp_path / "cache")
        (victim,) = (tmp_path / "cache").glob(f"*-train-{name}.npy")
        whole = victim.read_bytes()
        victim.write_bytes(whole[:-100])
        golden_datasets(tmp_path / "cache", monkeypatch)
        assert victim.read_bytes() == whole

    def test_an_index_without_its_description_is_not_whole(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        shutil.copytree(GOLDEN / "index_cache", tmp_path / "cache")
        (victim,) = (tmp_path / "cache").glob("*-train-description.txt")
        (array,) = (tmp_path / "cache").glob("*-train-shuffle_index.npy")
        written_at_ns = array.stat().st_mtime_ns
        victim.unlink()
        golden_datasets(tmp_path / "cache", monkeypatch)
        assert victim.exists()
        assert array.stat().st_mtime_ns != written_at_ns

    def test_a_build_that_is_interrupted_leaves_no_description(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        saved = []

        def interrupted(path: str, array: np.ndarray) -> None:
            saved.append(path)
            if len(saved) == 2:
                raise OSError(28, "No space left on device")

        monkeypatch.setattr(index_cache, "save_array", interrupted)
        with pytest.raises(OSError, match="No space left"):
            golden_datasets(tmp_path, monkeypatch)
        assert not list(tmp_path.glob("*description*"))
        monkeypatch.undo()
        self.test_names_and_bytes_are_those_of_the_reference(tmp_path, monkeypatch)

    @pytest.mark.parametrize("lengths", [[7, 20, 1, 33, 4], [60, 1, 1, 1, 1], [11] * 40])
    def test_an_index_of_other_data_under_the_same_name_is_built_again(
        self, lengths: list[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        prefix = write(tmp_path / "data", numbered([20, 7, 4, 33, 1]))
        dataset(prefix, 5)
        write(prefix, numbered(lengths))
        with caplog.at_level(logging.WARNING):
            again = dataset(prefix, 5)
        assert "belong to other data" in caplog.text
        shutil.rmtree(tmp_path / "data")
        fresh = dataset(prefix, 5)
        assert [again[i]["tokens"].tolist() for i in range(len(again))] == [
            fresh[i]["tokens"].tolist() for i in range(len(fresh))
        ]

    def test_the_cache_lies_beside_the_data_unless_told(self, tmp_path: Path) -> None:
        prefix = write(tmp_path / "data", numbered([50]))
        dataset(prefix, 1)
        names = os.listdir(tmp_path / "data" / "cache" / "GPTDataset_indices")
        assert len(names) == 5
        assert not [name for name in names if "tmp" in name or "lock" in name]


class TestEpochs:
    def request(self, num_samples: int | None) -> SampleRequest:
        lengths = np.random.RandomState(0).randint(1, 30, 50).astype(np.int32)
        return SampleRequest(
            source="the train split of data",
            indices=np.arange(5, 45, dtype=np.int32),
            sequence_lengths=lengths,
            num_samples=num_samples,
            sequence_length=8,
            random_seed=7,
        )

    def arrays(self, num_samples: int | None) -> GPTIndices:
        return build_indices(self.request(num_samples))

    def test_there_are_as_few_epochs_as_give_the_samples(self) -> None:
        one = self.request(None)
        assert one.num_epochs == 1
        per_epoch = one.tokens_per_epoch
        for epochs in (1, 2, 3):
            most = (epochs * per_epoch - 1) // 8
            assert self.request(most).num_epochs == epochs
            assert self.request(most + 1).num_epochs == epochs + 1

    def test_an_epoch_holds_every_sequence_of_the_split_once(self) -> None:
        documents = self.arrays(200).document_index
        assert np.bincount(documents, minlength=50).tolist() == [0] * 5 + [3] * 40 + [0] * 5

    def test_a_last_epoch_of_which_little_is_needed_is_shuffled_apart(self) -> None:
        per_epoch = self.request(None).tokens_per_epoch // 8
        apart = self.arrays(2 * per_epoch + 2)
        assert sorted(apart.document_index[:80]) == sorted([*range(5, 45)] * 2)
        before = (2 * self.request(None).tokens_per_epoch - 1) // 8
        assert sorted(apart.shuffle_index[:before]) == list(range(before))
        mixed = self.arrays(3 * per_epoch - 1)
        assert len(mixed.document_index) == len(apart.document_index) == 3 * 40
        assert sorted(mixed.document_index[:80]) != sorted([*range(5, 45)] * 2)

    @pytest.mark.parametrize(
        ("num_samples", "md5"),
        [
            (None, "02cd8293c36ce7d06eb0d5d1bdb1b869"),
            (160, "bd7ae95d25a6f959ab97ae8bb973c2d4"),
            (230, "f20b6ac6a85f116e1a044586834775aa"),
        ],
    )
    def test_arrays_never_change(self, num_samples: int | None, md5: str) -> None:
        built = self.arrays(num_samples)
        digest = hashlib.md5()
        for array in built:
            digest.update(array.tobytes())
        assert digest.hexdigest() == md5

    def test_indices_need_not_be_a_range(self) -> None:
        request = self.request(None)
        indices = np.array([1, 3, 7])
        expected = request.sequence_lengths[indices].sum()
        assert replace(request, indices=indices).tokens_per_epoch == expected
        assert replace(request, indices=indices[:0]).tokens_per_epoch == 0


class TestSamples:
    def test_samples_are_the_shuffled_documents_in_a_row(self, tmp_path: Path) -> None:
        documents = numbered([5, 9, 1, 14, 3, 8, 2])
        data = dataset(write(tmp_path / "data", documents), None)
        stream = [token for d in data.document_index for token in documents[d]]
        assert len(data) == (42 - 1) // 8
        for place, sample in enumerate(data.shuffle_index):
            item = data[place]
            start = int(sample) * 8
            assert item["tokens"].tolist() == stream[start : start + 8]
            assert item["labels"].tolist() == stream[start + 1 : start + 9]
            assert item["loss_mask"].tolist() == [1.0] * 8
            assert item["position_ids"].tolist() == list(range(8))

    @pytest.mark.parametrize("mmap", [True, False])
    def test_both_readers_give_the_same_samples(self, mmap: bool, tmp_path: Path) -> None:
        prefix = write(tmp_path / "data", numbered([5, 9, 1, 14, 3, 8, 2]))
        low = IndexedDataset(prefix, mmap=mmap)
        data = GPTDataset(low, prefix, np.arange(7, dtype=np.int32), None, Split.train, config())
        expected = dataset(prefix, None)
        for i in range(len(data)):
            assert data[i]["labels"].tolist() == expected[i]["labels"].tolist()

    def test_the_stream_is_a_function_of_seed_and_split_alone(self, tmp_path: Path) -> None:
        prefix = write(tmp_path / "data", numbered([30] * 10))
        same = [dataset(prefix, 30)[3]["tokens"].tolist() for _ in range(2)]
        other = dataset(prefix, 30, random_seed=5)[3]["tokens"].tolist()
        assert same[0] == same[1] != other

    def test_without_the_extra_token_the_last_label_bears_no_loss(self, tmp_path: Path) -> None:
        prefix = write(tmp_path / "data", numbered([16]))
        data = dataset(prefix, None, add_extra_token_to_sequence=False)
        assert len(data) == 2
        items = sorted((data[i] for i in range(2)), key=lambda item: int(item["tokens"][0]))
        assert items[1]["tokens"].tolist() == list(range(9, 17))
        assert items[1]["labels"].tolist() == [*range(10, 17), 0]
        assert items[1]["loss_mask"].tolist() == [1.0] * 7 + [0.0]

    def test_the_rest_of_the_validation_data_is_filled_up_without_loss(
        self, tmp_path: Path
    ) -> None:
        prefix = write(tmp_path / "data", numbered([12]))
        more = {"drop_last_partial_validation_sequence": False}
        data = dataset(prefix, None, Split.valid, **more)
        assert (len(data), len(dataset(prefix, None, Split.valid))) == (2, 1)
        last = next(data[i] for i in range(2) if data[i]["tokens"][0] == 9)
        assert last["tokens"].tolist() == [9, 10, 11, 12, 0, 0, 0, 0]
        assert last["labels"].tolist() == [10, 11, 12, 0, 0, 0, 0, 0]
        assert last["loss_mask"].tolist() == [1.0] * 3 + [0.0] * 5
        again = dataset(prefix, None, Split.valid, **more)  # from the cache
        assert len(again) == 2

    def test_a_sample_that_fills_up_a_batch_bears_no_loss(self, tmp_path: Path) -> None:
        data = dataset(write(tmp_path / "data", numbered([30])), None)
        assert data[None]["loss_mask"].sum() == 0
        assert data[0]["loss_mask"].sum() == 8

    def test_padding_in_the_data_bears_no_loss_unless_it_is_the_end_of_documents(
        self, tmp_path: Path
    ) -> None:
        prefix = write(tmp_path / "data", [[1, 2, 3, 3, 5, 6, 7, 8, 9]])
        tokenizer = Tokenizer()
        tokenizer.pad = 3
        item = dataset(prefix, None, tokenizer=tokenizer)[0]
        assert item["loss_mask"].tolist() == [1, 0, 0, 1, 1, 1, 1, 1]
        tokenizer.eod = 3
        assert dataset(prefix, None, tokenizer=tokenizer)[0]["loss_mask"].tolist() == [1] * 8

    @pytest.mark.parametrize("wrong", [512, -1])
    def test_an_id_outside_the_vocabulary_names_file_and_sequence(
        self, wrong: int, tmp_path: Path
    ) -> None:
        documents = numbered([6, 5, 6])
        documents[1][3] = wrong
        prefix = write(tmp_path / "data", documents, np.int32)
        data = dataset(prefix, None)
        message = rf"data\.bin, sequence 1: token id {wrong} lies outside the vocabulary of 512"
        with pytest.raises(DataError, match=message):
            [data[i] for i in range(len(data))]

    def test_too_few_tokens_for_one_sample_are_told(self, tmp_path: Path) -> None:
        prefix = write(tmp_path / "data", numbered([8]))
        with pytest.raises(DataError, match="train split of .*data holds 8 tokens, too few"):
            dataset(prefix, None)

    def test_a_split_without_tokens_is_told_at_once(self, tmp_path: Path) -> None:
        prefix = str(tmp_path / "data")
        builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
        builder.add_item([])
        builder.end_document()
        builder.finalize(f"{prefix}.idx")
        with pytest.raises(DataError, match=r"holds no tokens \(1 sequences, all empty\)"):
            dataset(prefix, 10)


class TestMasks:
    def by_hand(self, data: list[int], eod: int) -> tuple[list[list[bool]], list[float], list[int]]:
        documents, document = [], 0
        for token in data:
            documents.append(document)
            document += token == eod
        places = range(len(data))
        hidden = [[j > i or documents[i] != documents[j] for j in places] for i in places]
        positions = [i - documents.index(documents[i]) for i in places]
        return hidden, [float(token != eod) for token in data], positions

    @pytest.mark.feature("Data: document boundaries in masks, positions and loss")
    def test_resets_and_loss_follow_the_end_of_documents(self) -> None:
        random = np.random.default_rng(0)
        rows = random.integers(0, 4, (20, 16))
        mask, loss, positions = get_ltor_masks_and_position_ids(
            torch.from_numpy(rows), 0, True, True, True
        )
        assert mask is not None
        assert mask.shape == (20, 1, 16, 16)
        for i, row in enumerate(rows.tolist()):
            hidden, bears, places = self.by_hand(row, 0)
            assert mask[i, 0].tolist() == hidden
            assert loss[i].tolist() == bears
            assert positions[i].tolist() == places

    def test_without_resets_masks_are_causal_and_positions_count_on(self) -> None:
        tokens = torch.tensor([1, 0, 2])
        mask, loss, positions = get_ltor_masks_and_position_ids(tokens, 0, False, False, False)
        assert mask is not None
        assert mask.tolist() == [[[False, True, True], [False, False, True], [False] * 3]]
        assert loss.tolist() == [1.0] * 3
        assert positions.tolist() == [0, 1, 2]

    @pytest.mark.parametrize(
        "option", ["reset_position_ids", "reset_attention_mask", "eod_mask_loss"]
    )
    def test_each_option_acts_alone_in_a_dataset(self, option: str, tmp_path: Path) -> None:
        prefix = write(tmp_path / "data", [[1, 2, 0, 4, 5, 6, 0, 8, 9]])
        item = dataset(prefix, None, create_attention_mask=True, **{option: True})[0]
        plain = dataset(prefix, None, create_attention_mask=True)[0]
        keys = {
            "reset_position_ids": "position_ids",
            "reset_attention_mask": "attention_mask",
            "eod_mask_loss": "loss_mask",
        }
        differ = {key for key in item if not torch.equal(item[key], plain[key])}
        assert differ == {keys[option]}
        hidden, bears, places = self.by_hand([1, 2, 0, 4, 5, 6, 0, 8], 0)
        expected = {"position_ids": places, "attention_mask": [hidden], "loss_mask": bears}
        assert item[keys[option]].tolist() == expected[keys[option]]

    def test_the_mask_can_be_left_out(self, tmp_path: Path) -> None:
        prefix = write(tmp_path / "data", numbered([30]))
        assert "attention_mask" not in dataset(prefix, None)[0]
        assert dataset(prefix, None, create_attention_mask=True)[0]["attention_mask"].shape == (
            1,
            8,
            8,
        )

    def test_a_reset_of_a_mask_that_is_left_out_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="--no-create-attention-mask-in-dataloader"):
            config(reset_attention_mask=True, create_attention_mask=False)

    def test_bounds_of_documents_are_the_mask(self, tmp_path: Path) -> None:
        documents = [[1, 2, 0, 4, 5, 6, 0, 8, 9], [0, 0, 3], [7] * 12, [5, 0]]
        prefix = write(tmp_path / "data", documents)
        masks, bounds = (
            dataset(prefix, None, create_attention_mask=True, reset_attention_mask=True, **more)
            for more in ({}, {"mask_as_bounds": True})
        )
        rows = range(3)
        wanted, found = (collate([data[i] for i in rows]) for data in (masks, bounds))
        seen = found.pop("attention_mask")
        hidden = wanted.pop("attention_mask")
        assert torch.equal(seen.hidden(3, 8) | causal_mask(8), hidden)
        assert seen.cumulative.dtype == torch.int32
        assert seen.cumulative[-1] == 3 * 8
        assert seen.longest == seen.cumulative.diff().max()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)

    def test_items_do_not_share_what_one_of_them_changes(self, tmp_path: Path) -> None:
        prefix = write(tmp_path / "data", numbered([12]))
        data = dataset(prefix, None, Split.valid, drop_last_partial_validation_sequence=False)
        sums = [float(data[i]["loss_mask"].sum()) for i in (0, 1, 0, 1)]
        assert sums[:2] == sums[2:]
        assert set(sums) == {8.0, 3.0}


class TestMock:
    def mock(self, vocab_size: int = 512, eod: int = 0, **changes: Any) -> MockGPTDataset:
        made_up = config(blend=None, tokenizer=Tokenizer(vocab_size, eod), **changes)
        return MockGPTDataset(None, None, np.arange(1), 1000, Split.train, made_up)

    @pytest.mark.parametrize("vocab_size", [1, 2, 3, 17, 60000])
    def test_ids_lie_inside_any_vocabulary(self, vocab_size: int) -> None:
        for eod in {0, vocab_size // 2, vocab_size - 1}:
            data = self.mock(vocab_size, eod, sequence_length=1000)
            for i in range(3):
                item = data[i]
                assert min(item["tokens"].min(), item["labels"].min()) >= 0
                assert max(item["tokens"].max(), item["labels"].max()) < vocab_size

    def test_a_sample_depends_on_seed_split_and_number(self) -> None:
        data = self.mock()
        assert data[3]["tokens"].tolist() == self.mock()[3]["tokens"].tolist()
        assert data[3]["tokens"].tolist() != data[4]["tokens"].tolist()
        assert data[3]["tokens"].tolist() != self.mock(random_seed=2)[3]["tokens"].tolist()

    def test_the_next_id_follows_from_the_last(self) -> None:
        item = self.mock(512, 511, sequence_length=4000)[0]
        tokens, labels = item["tokens"], item["labels"]
        inside = (tokens != 511) & (labels != 511)
        assert torch.equal((tokens[inside] + 1) % 511, labels[inside])
        ends = int((labels == 511).sum())
        assert 4 <= ends <= 40

    def test_there_are_as_many_samples_as_asked_for_and_no_more(self) -> None:
        data = self.mock()
        assert len(data) == 1000
        with pytest.raises(IndexError, match="sample 1000 of 1000"):
            data[1000]

    @pytest.mark.feature("Data: made-up data for any vocabulary, without files")
    def test_no_file_is_needed(self) -> None:
        made_up = config(blend=None, split="98,2,0")
        builder = BlendedMegatronDatasetBuilder(MockGPTDataset, [5, None, 7], lambda: True, made_up)
        train, valid, test = builder.build()
        assert (len(train), len(valid), test) == (5, 128, None)


class TestPackedDocuments:
    def test_a_sample_holds_complete_documents_and_padding_without_loss(
        self, tmp_path: Path
    ) -> None:
        lengths = [3, 9, 5, 1, 20, 4, 7, 2, 6]  # 20 tokens become pieces of 9, 9 and 2
        documents = numbered(lengths)
        packed = dataset(write(tmp_path / "data", documents), pack_documents=True)
        whole = [tuple(d) for d in documents if len(d) <= 9]
        long = documents[4]
        pieces = [*whole, tuple(long[:9]), tuple(long[9:18]), tuple(long[18:])]
        for epoch in range(2):
            seen = []
            for i in range(len(packed)):
                sample = packed[epoch * len(packed) + i]
                tokens = [*sample["tokens"].tolist(), int(sample["labels"][-1])]
                parts = [(s, o, n) for s, o, n in packed.pieces(epoch * len(packed) + i)]
                num_real = sum(n for *_, n in parts)
                assert not any(tokens[num_real:])
                assert int(sample["loss_mask"].sum()) == num_real - 1
                for _, _, count in parts:
                    seen.append(tuple(tokens[:count]))
                    tokens = tokens[count:]
            assert sorted(seen) == sorted(pieces)

    def test_at_most_one_percent_is_padding(self, tmp_path: Path) -> None:
        random = np.random.default_rng(0)
        lengths = np.minimum(random.lognormal(5.5, 1.2, 3000), 20_000).astype(int) + 1
        documents = [np.ones(n, np.uint16) for n in lengths]
        prefix = write(tmp_path / "data", documents)
        packed = dataset(prefix, pack_documents=True, sequence_length=2048)
        assert sum(lengths) / (len(packed) * 2049) > 0.99

    def test_a_growing_order_is_refused(self, tmp_path: Path) -> None:
        prefix = write(tmp_path / "data", numbered([9] * 5))
        with pytest.raises(ConfigError, match="--pack-documents needs the lengths of all"):
            dataset(prefix, pack_documents=True, index_free=True)
