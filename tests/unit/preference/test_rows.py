"""Rows of pairs: what they may hold, and which tokens of a row carry loss."""

from __future__ import annotations

import json

import numpy as np
import pytest

from megatron.core.config.errors import DataError
from megatron.core.datasets.utils import Split
from megatron.post_training.preference.dataset import (
    PreferenceDataset,
    PreferenceDatasetConfig,
    pair_of,
)
from megatron.training.tokenizer.base import _NullTokenizer

ASK = {"role": "user", "content": "Why?"}
GOOD = {"role": "assistant", "content": "So."}
BAD = {"role": "assistant", "content": "No."}
MORE = {"role": "user", "content": "And?"}


def test_a_row_has_a_prompt_or_the_prompt_is_what_both_begin_with():
    pair = pair_of({"prompt": [ASK], "chosen": [GOOD], "rejected": [BAD]})
    assert pair.chosen.messages == (ASK, GOOD)
    assert pair.rejected.messages == (ASK, BAD)
    assert pair.chosen.first_trained == 1
    whole = {"chosen": [ASK, GOOD, MORE, GOOD], "rejected": [ASK, GOOD, MORE, BAD]}
    pair = pair_of(whole)
    assert pair.rejected.messages == (ASK, GOOD, MORE, BAD)
    assert pair.chosen.first_trained == pair.rejected.first_trained == 3
    assert pair_of({"prompt": "a", "chosen": " b", "rejected": " c"}).rejected.is_text


def test_texts_without_a_prompt_begin_with_it():
    """As trl.extract_prompt: a space before the answers belongs to them."""
    pair = pair_of({"chosen": "H: a? A: yes", "rejected": "H: a? A: no"})
    assert [message["content"] for message in pair.chosen.messages] == ["H: a? A:", " yes"]
    assert [message["content"] for message in pair.rejected.messages] == ["H: a? A:", " no"]
    assert pair.chosen.is_text


def test_a_prompt_that_is_a_text_beside_conversations_repeats_their_first_message():
    row = {"prompt": "Why?", "chosen": [ASK, GOOD], "rejected": [ASK, BAD]}
    assert pair_of(row) == pair_of({"chosen": [ASK, GOOD], "rejected": [ASK, BAD]})


def test_pairs_of_sharegpt_are_read():
    answers = {"chosen": {"from": "gpt", "value": "So."}, "rejected": {"from": "gpt", "value": "N"}}
    row = {"conversations": [{"from": "human", "value": "Why?"}], "system": "Be brief.", **answers}
    pair = pair_of(row)
    assert pair.chosen.messages == ({"role": "system", "content": "Be brief."}, ASK, GOOD)
    assert pair.rejected.first_trained == 2


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "a", "chosen": "b"}, "a row needs chosen and rejected; this one has prompt"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "chosen and rejected are equal"),
        ({"chosen": [ASK, GOOD], "rejected": [MORE, BAD]}, "begin with different messages"),
        ({"chosen": [ASK, GOOD], "rejected": [ASK]}, "an assistant's answer must follow"),
        ({"prompt": "a", "chosen": "", "rejected": "b"}, "chosen is empty"),
        ({"prompt": [ASK], "chosen": "b", "rejected": "c"}, "chosen is 'b'; it must be a list"),
        ({"prompt": [ASK], "chosen": [GOOD], "rejected": "c"}, "rejected is 'c'; it must be a"),
        ({"prompt": "a", "chosen": 1, "rejected": 2}, "chosen is 1; it must be a list of messages"),
        ({"chosen": "a b", "rejected": "c"}, "begin with different texts; give prompt"),
    ],
)
def test_a_wrong_row_is_refused(row, reason):
    with pytest.raises(DataError, match=reason):
        pair_of(row)


def dataset_of(tmp_path, rows, **settings) -> PreferenceDataset:
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = PreferenceDatasetConfig(
        random_seed=1,
        sequence_length=16,
        split="1,0,0",
        blend=([str(path)], None),
        path_to_cache=str(tmp_path / "cache"),
        tokenizer=_NullTokenizer(50),
        **settings,
    )
    pairs = PreferenceDataset.build_low_level_dataset(str(path), config)
    return PreferenceDataset(pairs, str(path), np.arange(len(rows)), None, Split.train, config)


ROW = {"prompt": "1 2", "chosen": " 3 4", "rejected": " 5"}  # and the end-of-document token


def test_answers_carry_the_loss_and_their_reference(tmp_path):
    references = np.array([-7.0, -9.0])
    dataset = dataset_of(tmp_path, [ROW], references={str(tmp_path / "pairs.jsonl"): references})
    row = dataset[0]
    eod = dataset.config.tokenizer.eod
    assert row["labels"][:7].tolist() == [2, 3, 4, eod, 2, 5, eod]
    assert row["loss_mask"][:8].tolist() == [0, 1, 1, 1, 0, 1, 1, 0]
    assert row["is_rejected"][:8].tolist() == [0, 0, 0, 0, 1, 1, 1, 0]
    assert row["reference"][:8].tolist() == [0, -7, 0, 0, 0, -9, 0, 0]
    assert row["packed_seq_params"].cumulative.tolist() == [0, 4, 7, 16]
    assert not dataset[None]["loss_mask"].any()


def test_a_reward_model_scores_the_last_token(tmp_path):
    row = dataset_of(tmp_path, [ROW], scores_answers=True)[0]
    assert row["tokens"][:5].tolist() == [1, 2, 3, 4, _NullTokenizer(50).eod]
    assert row["loss_mask"].nonzero().flatten().tolist() == [4, 8]
    assert row["packed_seq_params"].cumulative.tolist() == [0, 5, 9, 16]


def test_a_pair_that_is_too_long_is_cut_fairly_or_left_out(tmp_path, caplog):
    long = {"prompt": "1", "chosen": " 2" * 30, "rejected": " 3 4"}
    longer = {"prompt": "1", "chosen": " 2" * 30, "rejected": " 3" * 30}
    dataset = dataset_of(tmp_path, [long, longer])
    assert dataset.kept_lengths.tolist() == [[13, 3], [8, 8]]
    dataset = dataset_of(tmp_path, [long, ROW], truncates=False)
    assert dataset.kept_lengths.tolist() == [[0, 0], [4, 3]]
    with pytest.raises(DataError, match="all pairs of the train split are longer"):
        dataset_of(tmp_path, [long], scores_answers=True)  # the cut answer has no last token
