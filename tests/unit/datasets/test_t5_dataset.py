"""Samples of T5: spans taken out of the encoder's text, and told by the decoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.core.config.errors import ConfigError
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.t5_dataset import MockT5MaskedWordPieceDataset, T5MaskedWordPieceDataset
from tests.support.masked_samples import (
    MOCK,
    WordPieces,
    corpus,
    made_up,
    t5_config,
    t5_dataset,
)

IDS = WordPieces()


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return corpus(tmp_path / "data")


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


def test_t5_config_names_what_cannot_be() -> None:
    with pytest.raises(ConfigError, match="--decoder-seq-length 2"):
        t5_config(sequence_length_decoder=2)
    with pytest.raises(ConfigError, match="masking_do_permutation"):
        t5_config(masking_do_permutation=True)
