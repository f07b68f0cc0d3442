"""HuggingFaceTokenizer: what its files say, by `tokenizers` where that is enough."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys

import numpy as np
import pytest
import tokenizers
from tokenizers.processors import TemplateProcessing

from megatron.core.config.errors import ConfigError
from megatron.training.tokenizer import MissingToken, TokenizerSpec, create_tokenizer
from megatron.training.tokenizer.huggingface import _HuggingFaceTokenizer

TEXTS = ("Hello world", "", " \n\t x  y", "caf\u00e9 \u4f60 <|endoftext|> z")


def create(path):
    spec = TokenizerSpec(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(path))
    return create_tokenizer(spec)


def with_template(bpe_dir, directory, config):
    """The small BPE with BOS before and EOS after a text, and a tokenizer_config.json."""
    rules = tokenizers.Tokenizer.from_file(str(bpe_dir / "tokenizer.json"))
    rules.add_special_tokens(["<s>", "</s>"])
    rules.post_processor = TemplateProcessing(
        single="<s> $A </s>",
        special_tokens=[("<s>", rules.token_to_id("<s>")), ("</s>", rules.token_to_id("</s>"))],
    )
    rules.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return rules


def test_a_bare_tokenizer_json_needs_no_transformers(bpe_dir, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    tokenizer = create(bpe_dir / "tokenizer.json")
    owner = tokenizers.Tokenizer.from_file(str(bpe_dir / "tokenizer.json"))
    for text in TEXTS:
        assert tokenizer.tokenize(text) == owner.encode(text).ids
    assert tokenizer.eod == owner.token_to_id("<|endoftext|>")
    assert tokenizer.vocab_size == owner.get_vocab_size()
    assert tokenizer.detokenize(tokenizer.tokenize(TEXTS[3])) == TEXTS[3]


def test_the_plain_way_gives_what_transformers_gives(bpe_dir, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "__type": "AddedToken"},
    }
    rules = with_template(bpe_dir, tmp_path, config)
    tokenizer = create(tmp_path)
    wrapper = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        assert tokenizer.tokenize(text) == wrapper(text).input_ids
        assert tokenizer.detokenize(wrapper(text).input_ids) == wrapper.decode(
            wrapper(text).input_ids
        )
    assert (tokenizer.bos, tokenizer.eos) == (rules.token_to_id("<s>"), rules.token_to_id("</s>"))
    assert tokenizer.eod == wrapper.eos_token_id
    assert tokenizer.vocab_size == len(wrapper)
    special = tokenizer.special_ids()
    for text in TEXTS:
        ids = wrapper(text).input_ids
        shown = tokenizer.detokenize([i for i in ids if i not in special])
        assert shown == wrapper.decode(ids, skip_special_tokens=True)
    with pytest.raises(MissingToken, match="no PAD token"):
        _ = tokenizer.pad


def test_a_class_that_changes_the_rules_is_built_by_transformers(bpe_dir, tmp_path):
    transformers = pytest.importorskip("transformers")
    shutil.copy(bpe_dir / "tokenizer.json", tmp_path)
    config = {
        "tokenizer_class": "GPT2Tokenizer",
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = create(tmp_path)
    wrapper = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        assert tokenizer.tokenize(text) == wrapper(text).input_ids
    batch = tokenizer.tokenize_batch(TEXTS)
    assert batch.ids.tolist() == [i for text in TEXTS for i in wrapper(text).input_ids]
    assert (tokenizer.pad, tokenizer.eod) == (wrapper.pad_token_id, wrapper.eos_token_id)


def test_ids_around_a_text_are_known_to_the_fast_libraries(bpe_dir, tmp_path):
    rules = with_template(bpe_dir, tmp_path, {"bos_token": "<s>", "eos_token": "</s>"})
    found = create(tmp_path).bpe_rules()
    assert found is not None
    assert found.prefix == (rules.token_to_id("<s>"),)
    assert found.suffix == (rules.token_to_id("</s>"),)
    plain = rules.encode("one two", add_special_tokens=False).ids
    assert create(tmp_path).tokenize_plain("one two") == plain
    assert create(tmp_path).tokenize("one two") != plain
    assert json.loads(found.tokenizer_json)["post_processor"] is None


def test_a_length_limit_in_the_file_does_not_cut_texts(bpe_dir, tmp_path):
    rules = tokenizers.Tokenizer.from_file(str(bpe_dir / "tokenizer.json"))
    wanted = rules.encode("one two three four").ids
    rules.enable_truncation(2)
    rules.enable_padding(length=100)
    rules.save(str(tmp_path / "tokenizer.json"))
    assert create(tmp_path).tokenize("one two three four") == wanted
    assert create(tmp_path).tokenize_batch(["one two three four"]).ids.tolist() == wanted


def test_offsets_start_where_the_tokens_do(bpe_dir):
    tokenizer = create(bpe_dir)
    ids = tokenizer.tokenize("one two three")
    offsets = tokenizer.offsets(ids, "one two three")
    assert offsets[0] == 0
    assert np.all(np.diff(offsets) > 0)


def test_a_path_that_holds_no_tokenizer_is_an_error_with_the_flag(tmp_path):
    with pytest.raises(ConfigError, match=f"--tokenizer-model {tmp_path}"):
        create(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="it must be a tokenizer.json"):
        create(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match="tokenizer_config.json is no JSON"):
        create(tmp_path)


def test_extra_ids_come_behind_the_files_own(bpe_dir, tmp_path):
    transformers = pytest.importorskip("transformers")
    rules = with_template(bpe_dir, tmp_path, {"tokenizer_class": "PreTrainedTokenizerFast"})
    spec = TokenizerSpec(
        tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(tmp_path), vocab_extra_ids=3
    )
    size = rules.get_vocab_size()
    plain, wrapped = create_tokenizer(spec), _HuggingFaceTokenizer(str(tmp_path), 3, use_fast=True)
    assert wrapped._wrapper.__class__.__module__.startswith(transformers.__name__)
    for tokenizer in (plain, wrapped):
        assert tokenizer.additional_special_tokens_ids == [size, size + 1, size + 2]
        assert tokenizer.vocab_size == size + 3
        assert tokenizer.tokenize("a <extra_id_1>")[-2:] == [size + 1, rules.token_to_id("</s>")]
    assert plain.unique_identifiers["vocab_extra_ids"] == "3"
    assert "vocab_extra_ids" not in create(tmp_path).unique_identifiers
    assert create(tmp_path).additional_special_tokens_ids == []


def test_extra_ids_that_the_files_have_keep_their_ids(bpe_dir, tmp_path):
    rules = tokenizers.Tokenizer.from_file(str(bpe_dir / "tokenizer.json"))
    rules.add_special_tokens(["<extra_id_1>", "<extra_id_0>"])  # T5's: from the end
    rules.save(str(tmp_path / "tokenizer.json"))
    size = rules.get_vocab_size()
    assert _HuggingFaceTokenizer(str(tmp_path), 2).additional_special_tokens_ids == [
        size - 1,
        size - 2,
    ]


def test_code_that_lies_beside_a_tokenizer_is_not_run(bpe_dir, tmp_path):
    pytest.importorskip("transformers")
    folder = tmp_path / "theirs"
    shutil.copytree(bpe_dir, folder)
    (folder / "code.py").write_text(f"open({str(tmp_path / 'it-ran')!r}, 'w')")
    own = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "code.Own"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(own))
    with contextlib.suppress(ConfigError):  # or the rules that tokenizer.json has
        _HuggingFaceTokenizer(str(folder))
    assert not (tmp_path / "it-ran").exists()


@pytest.mark.parametrize("text", ["[1]", "3", "[" * 100_000, '{"a":' * 100_000])
def test_a_tokenizer_config_that_is_no_object_is_named(bpe_dir, tmp_path, text):
    folder = tmp_path / "theirs"
    shutil.copytree(bpe_dir, folder)
    (folder / "tokenizer_config.json").write_text(text)
    with pytest.raises(ConfigError, match="tokenizer_config.json is no JSON"):
        _HuggingFaceTokenizer(str(folder))


def test_a_class_that_is_no_text_is_an_error_with_the_flag(bpe_dir, tmp_path):
    pytest.importorskip("transformers")
    folder = tmp_path / "theirs"
    shutil.copytree(bpe_dir, folder)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": [5]}')
    with pytest.raises(ConfigError, match="--tokenizer-model .*theirs: "):
        _HuggingFaceTokenizer(str(folder))
