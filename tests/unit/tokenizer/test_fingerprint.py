"""The fingerprint of a tokenizer: data is accepted where, and only where, its ids stay the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from megatron.core.config.errors import DataError
from megatron.training.tokenizer import TokenizerSpec, create_tokenizer, fingerprint
from megatron.training.tokenizer.fingerprint import Fingerprint, read_fingerprint, sidecar_path
from tests.support.tokenizer_files import SPM_MODEL

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "world", "##s", "!", "a"]


def wordpiece(directory, extra_ids=0, kind="BertWordPieceLowerCase", words=WORDS):
    path = directory / "vocab.txt"
    path.write_text("\n".join(words) + "\n")
    return create_tokenizer(
        TokenizerSpec(tokenizer_type=kind, vocab_file=str(path), vocab_extra_ids=extra_ids)
    )


def sentencepiece(extra_ids):
    return create_tokenizer(
        TokenizerSpec(
            tokenizer_type="SentencePieceTokenizer",
            tokenizer_model=str(SPM_MODEL),
            vocab_extra_ids=extra_ids,
        )
    )


def hugging_face(directory, extra_ids=0):
    return create_tokenizer(
        TokenizerSpec(
            tokenizer_type="HuggingFaceTokenizer",
            tokenizer_model=str(directory),
            vocab_extra_ids=extra_ids,
        )
    )


def with_added_tokens(bpe_dir, directory, contents):
    """A tokenizer.json that has special tokens after the vocabulary of ``bpe_dir``."""
    rules = json.loads((bpe_dir / "tokenizer.json").read_text())
    first = max(rules["model"]["vocab"].values()) + 1
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    rules["added_tokens"] += [
        {"id": first + i, "content": content, "special": True, **flags}
        for i, content in enumerate(contents)
    ]
    directory.mkdir()
    (directory / "tokenizer.json").write_text(json.dumps(rules))
    return hugging_face(directory)


def assert_accepted(tmp_path, written, asked):
    written.write(str(tmp_path / "d"))
    fingerprint.check_same_tokenizer(str(tmp_path / "d"), asked)


def assert_refused(tmp_path, written, asked):
    written.write(str(tmp_path / "d"))
    with pytest.raises(DataError, match="was written with"):
        fingerprint.check_same_tokenizer(str(tmp_path / "d"), asked)


@pytest.mark.parametrize("written_with", [0, 7, 100])
@pytest.mark.parametrize("asked_with", [0, 7, 100])
@pytest.mark.parametrize("kind", ["wordpiece", "sentencepiece", "hugging_face"])
def test_extra_ids_do_not_count(tmp_path, bpe_dir, kind, written_with, asked_with):
    make = {
        "wordpiece": lambda n: wordpiece(tmp_path, n),
        "sentencepiece": sentencepiece,
        "hugging_face": lambda n: hugging_face(bpe_dir, n),
    }[kind]
    assert Fingerprint.of(make(written_with)) == Fingerprint.of(make(asked_with))
    assert_accepted(tmp_path, Fingerprint.of(make(written_with)), make(asked_with))


def test_special_tokens_that_are_only_appended_do_not_count(tmp_path, bpe_dir):
    written = Fingerprint.of(hugging_face(bpe_dir))
    larger = with_added_tokens(bpe_dir, tmp_path / "chat", ["<|im_start|>", "<|im_end|>"])
    assert larger.vocab_size == written.vocab_size + 2
    assert_accepted(tmp_path, written, larger)
    # The other way round the data may hold ids that the run does not have.
    assert_refused(tmp_path, Fingerprint.of(larger), hugging_face(bpe_dir))


def test_a_longer_vocabulary_or_another_rule_counts(tmp_path):
    written = Fingerprint.of(wordpiece(tmp_path, 3))
    assert_refused(tmp_path, written, wordpiece(tmp_path, 3, words=[*WORDS, "<extra_word>"]))
    assert_refused(tmp_path, written, wordpiece(tmp_path, 3, "BertWordPieceCase"))
    assert_refused(tmp_path, written, wordpiece(tmp_path, 3, words=[*WORDS[:-1], "b"]))


def test_two_tokens_of_one_id_have_one_fingerprint_in_every_process(tmp_path):
    vocab = {token: i for i, token in enumerate(WORDS)}
    vocab |= {f"word{i}": vocab["hello"] for i in range(8)}
    model = {
        "type": "WordPiece",
        "unk_token": "[UNK]",
        "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 100,
        "vocab": vocab,
    }
    content = {"version": "1.0", "added_tokens": [], "model": model}
    content |= dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor", "decoder"))
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    program = (
        "import sys; from megatron.training.tokenizer import TokenizerSpec, create_tokenizer\n"
        "from megatron.training.tokenizer.fingerprint import Fingerprint\n"
        "spec = TokenizerSpec(tokenizer_type='HuggingFaceTokenizer', tokenizer_model=sys.argv[1])\n"
        "print(*{Fingerprint.of(create_tokenizer(spec)).sha256 for _ in range(8)})"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    found = {
        subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ).stdout
        for _ in range(2)
    }
    assert len(found) == 1
    assert len(next(iter(found)).split()) == 1


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        "null",
        '{"a": 1}',
        '{"tokenizer": 1, "vocab_size": 2, "eod": 3, "sha256": 4}',
        "[" * 9999,
    ],
)
def test_a_sidecar_of_another_form_is_refused_with_its_name(tmp_path, content):
    prefix = str(tmp_path / "d")
    with open(sidecar_path(prefix), "w") as file:
        file.write(content)
    with pytest.raises(DataError, match=r"d\.tokenizer\.json: .*preprocess the data again"):
        read_fingerprint(prefix)
