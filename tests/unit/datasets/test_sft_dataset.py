"""Rows of conversations: what they hold, and what their cache notices."""

from __future__ import annotations

import json
import logging
import os

import numpy as np
import pytest
import torch

from megatron.core.config.errors import ConfigError, DataError
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.core.datasets.utils import Split
from megatron.post_training.sft.dataset import (
    MockSFTDataset,
    SFTDataset,
    SFTDatasetConfig,
    SFTLowLevelDataset,
)
from megatron.training.data.loaders import mean_row_tokens
from megatron.training.tokenizer.base import TokenizerSpec, _NullTokenizer
from megatron.training.tokenizer.chat import load_chat_template
from megatron.training.tokenizer.sft_tokenizer import SFTTokenizer
from megatron.training.tokenizer.tokenizer import create_tokenizer
from tests.support.chat_templates import write_chat_tokenizer, write_conversations

pytest.importorskip("jinja2")
pytest.importorskip("tokenizers")

S = 256


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = write_chat_tokenizer(tmp_path_factory.mktemp("sft"))
    write_conversations(folder / "chats.jsonl", 40)
    return folder


def config_of(folder, path="chats.jsonl", **more):
    spec = TokenizerSpec(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder))
    tokenizer = create_tokenizer(spec)
    given = {
        "random_seed": 1234,
        "sequence_length": S,
        "blend": ([str(folder / path)], None),
        "split": "1,0,0",
        "path_to_cache": str(folder / "cache"),
        "tokenizer": tokenizer,
        "chat": load_chat_template(tokenizer, None, str(folder)),
    }
    return SFTDatasetConfig(**(given | more))


def build(config, sizes=(None, 0, 0), cls=SFTDataset):
    return BlendedMegatronDatasetBuilder(cls, list(sizes), lambda: True, config).build()[0]


def test_a_row_holds_complete_conversations_one_after_the_other(folder):
    config = config_of(folder)
    dataset = build(config)
    chat = config.chat
    low = SFTLowLevelDataset(str(folder / "chats.jsonl"))
    seen = []
    for i in range(len(dataset)):
        row = dataset[i]
        ends = row["packed_seq_params"].cumulative.tolist()
        assert ends[-1] == S
        assert row["packed_seq_params"].longest == np.diff(ends).max()
        numbers = dataset.rows[i].tolist()
        seen += numbers
        for number, start, end in zip(numbers, ends[:-1], ends[1:], strict=False):
            encoded = chat.encode(low[number])
            assert row["tokens"][start:end].tolist() == encoded.tokens[:-1].tolist()
            assert row["labels"][start:end].tolist() == encoded.tokens[1:].tolist()
            assert row["loss_mask"][start:end].tolist() == encoded.is_trained[1:].tolist()
            assert row["position_ids"][start:end].tolist() == list(range(end - start))
            assert not row["is_padding"][start:end].any()
        used = ends[len(numbers)]
        assert row["is_padding"][used:].all()
        assert not row["loss_mask"][used:].any()
    assert sorted(seen) == list(range(40))
    assert not dataset[None]["loss_mask"].any()


def test_samples_are_padded_to_the_alignment(folder):
    dataset = build(config_of(folder, alignment=8))
    for i in range(len(dataset)):
        row = dataset[i]
        ends = row["packed_seq_params"].cumulative
        assert not (ends % 8).any()
        position = row["position_ids"]
        assert ((position == 0).nonzero().flatten().int() == ends[:-1]).all()


def test_without_packing_a_row_is_one_conversation(folder):
    dataset = build(config_of(folder, packs=False))
    assert len(dataset) == 40
    assert all(len(dataset.rows[i]) == 1 for i in range(40))
    several = build(config_of(folder, packs=False), (41, 0, 0))
    assert len(several) == 80  # complete epochs
    assert sorted(int(several.rows[i][0]) for i in range(40, 80)) == list(range(40))


def test_rows_end_with_their_conversation_padded_to_the_row_multiple(folder):
    config = config_of(folder, packs=False, row_multiple=24, alignment=8)
    dataset = build(config)
    complete = build(config_of(folder, packs=False, alignment=8))
    lengths = set()
    for i in range(len(dataset)):
        row = dataset[i]
        bounds = row.pop("packed_seq_params")
        n = int(bounds.cumulative[-1])
        assert n == S or n % 24 == 0
        expected = complete[i]
        used = int((~expected["is_padding"]).sum())
        assert n - used < 24
        ends = expected.pop("packed_seq_params").cumulative
        assert bounds.cumulative.tolist() == ends.clamp(max=n).unique().tolist()
        for name, values in row.items():
            assert values.equal(expected[name][:n]), name
        lengths.add(n)
    assert len(lengths) > 2
    assert not dataset[None]["loss_mask"].any()


def test_the_work_of_a_step_is_estimated_by_the_mean_length_of_rows(folder):
    dataset = build(config_of(folder, packs=False, row_multiple=16))
    lengths = [len(dataset[i]["tokens"]) for i in range(len(dataset))]
    assert mean_row_tokens(dataset) == int(np.mean(lengths)) < S
    same = str(folder / "chats.jsonl")
    config = config_of(folder, packs=False, row_multiple=16, blend=([same, same], [1.0, 3.0]))
    assert mean_row_tokens(build(config, (8, 0, 0))) == int(np.mean(lengths))
    assert mean_row_tokens(build(config_of(folder))) == 0
    assert mean_row_tokens(None) == 0


def test_tokens_are_encoded_once_per_file_template_and_tokenizer(folder, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    cache = str(tmp_path / "cache")
    path = write_conversations(tmp_path / "more.jsonl", 10)
    common = {"path_to_cache": cache, "blend": ([str(path)], None)}

    def encodes(**more):
        caplog.clear()
        dataset = build(config_of(folder, **common, **more))
        return "encoded 10 conversations" in caplog.text, dataset

    assert encodes()[0]
    assert not encodes()[0]
    assert not encodes(sequence_length=128, random_seed=1, packs=False)[0]
    first = encodes()[1]
    status = os.stat(path)
    path.write_text(path.read_text().replace("the", "THE"))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    changed, dataset = encodes()
    assert changed
    pairs = [(dataset[i]["tokens"], first[i]["tokens"]) for i in range(len(first))]
    assert not all(torch.equal(*pair) for pair in pairs)
    template = tmp_path / "own.jinja"
    template.write_text("{% for m in messages %}{{ m.role + m.content }}{% endfor %}")
    tokenizer = config_of(folder).tokenizer
    assert encodes(chat=load_chat_template(tokenizer, str(template), None))[0]


@pytest.mark.feature("Fine-tuning: a run reports how many conversations are cut or left out")
@pytest.mark.parametrize(("truncates", "cut", "left_out"), [(True, 2, 1), (False, 0, 3)])
def test_long_conversations_are_counted(folder, tmp_path, caplog, truncates, cut, left_out):
    def turn(role, length):
        return {"role": role, "content": "word " * length}

    rows = [
        [turn("user", 3), turn("assistant", 100)],
        [turn("user", 3), turn("assistant", 2), turn("user", 100), turn("assistant", 2)],
        [turn("user", 100), turn("assistant", 3)],  # no trained token before the cut
        [turn("user", 3), turn("assistant", 3)],
    ]
    path = tmp_path / "long.jsonl"
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    config = config_of(folder, path, sequence_length=64, truncates=truncates, packs=False)
    dataset = build(config)
    assert (
        f"long.jsonl: 3 of 4 conversations are longer than --seq-length 64: {cut} are cut to it, "
        f"{left_out} are left out (--sft-long-conversations)"
    ) in caplog.text
    assert len(dataset) == 4 - left_out
    assert all(dataset[i]["loss_mask"].any() for i in range(len(dataset)))
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows[2:3]))
    with pytest.raises(DataError, match=r"are longer than --seq-length 64 and left out: raise it"):
        build(config_of(folder, path, sequence_length=64, truncates=truncates))


def test_all_wrong_rows_are_reported_at_once_and_nothing_is_cached(folder, tmp_path):
    path = tmp_path / "wrong.jsonl"
    good = json.dumps({"messages": [{"role": "user", "content": "a"}]})
    path.write_text("{\n" + good + "\n" * 2 + 11 * (good + "\n"))
    cache = tmp_path / "cache"
    with pytest.raises(DataError) as error:
        build(config_of(folder, path, path_to_cache=str(cache)))
    lines = str(error.value).splitlines()
    assert lines[0] == "13 of 13 conversations are wrong:"
    assert lines[1].startswith(f"{path}, line 1: it is no JSON")
    assert lines[2].startswith(f"{path}, line 2: the last message is of the user")
    assert lines[3].startswith(f"{path}, line 4: ")
    assert len(lines) == 12
    assert lines[-1] == "and 3 more"
    assert not list(cache.glob("*.npy"))


def test_messages_need_a_template_and_texts_do_not(folder, tmp_path):
    with pytest.raises(DataError, match="line 1: messages need a chat template; give --chat-temp"):
        build(config_of(folder, chat=None, path_to_cache=str(tmp_path / "one")))
    path = tmp_path / "texts.jsonl"
    path.write_text(json.dumps({"prompt": "One,", "completion": " two."}))
    dataset = build(config_of(folder, path, chat=None, path_to_cache=str(tmp_path / "two")))
    assert dataset[0]["loss_mask"].sum() > 1
    with pytest.raises(ConfigError, match="no data is named: give --data-path"):
        SFTDataset.build_low_level_dataset(None, config_of(folder))


def test_a_script_for_megatron_builds_it_with_its_own_config(folder):
    path = str(folder / "chats.jsonl")
    config = GPTDatasetConfig(
        random_seed=1234,
        sequence_length=S,
        blend=([path], None),
        split="1,0,0",
        path_to_cache=str(folder / "cache"),
        tokenizer=SFTTokenizer(str(folder), "default"),
    )
    source = SFTDataset.build_low_level_dataset(path, config)
    assert SFTDataset.numel_low_level_dataset(source) == 40
    assert source[0][0]["role"] == "user"
    dataset = SFTDataset(source, path, np.arange(40), None, Split.train, config)
    assert len(dataset) == 40
    assert dataset[3]["loss_mask"].any()


def test_mock_conversations_need_no_file(tmp_path):
    config = SFTDatasetConfig(
        random_seed=1, sequence_length=1024, tokenizer=_NullTokenizer(100), split="9,1,0"
    )
    assert config.mock
    dataset = build(config, (10, 0, 0), MockSFTDataset)
    assert dataset.rows.fill > 0.95
    assert dataset[0]["tokens"].max() <= 100


def test_the_log_shows_how_rows_of_alpaca_are_read(folder, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    path = tmp_path / "alpaca.jsonl"
    path.write_text(json.dumps({"instruction": "Add.", "input": "1 and 1", "output": "2"}) + "\n")
    build(config_of(folder, blend=([str(path)], None), path_to_cache=str(tmp_path)))
    assert f"{path} has rows of Alpaca, read as" in caplog.text
    assert r'"content": "Add.\n\n1 and 1"' in caplog.text
