"""train_tokenizer.py: files that the tokenizers of this project load."""

from __future__ import annotations

import json

import pytest

from megatron.core.config.errors import ConfigError, DataError
from megatron.training.tokenizer import TokenizerSpec, create_tokenizer
from tests.support.tokenizer_files import CORPUS, corpus_texts
from tools import train_tokenizer


def train(directory, *flags):
    argv = ["--input", str(CORPUS), "--output-dir", str(directory), *flags]
    train_tokenizer.main(argv)


def test_a_bpe_is_written_in_both_layouts_and_loses_nothing(tmp_path):
    train(tmp_path / "tok", "--vocab-size", "400", "--special-tokens", "<|endoftext|>", "<pad>")
    gpt2 = create_tokenizer(
        TokenizerSpec(
            tokenizer_type="GPT2BPETokenizer",
            vocab_file=str(tmp_path / "tok" / "vocab.json"),
            merge_file=str(tmp_path / "tok" / "merges.txt"),
        )
    )
    hugging_face = create_tokenizer(
        TokenizerSpec(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(tmp_path / "tok"))
    )
    assert gpt2.vocab_size == hugging_face.vocab_size == 400
    assert gpt2.eod == hugging_face.eod
    assert "<pad>" in hugging_face.vocab
    text = corpus_texts()[7] + " \u4f60\U0001f600"
    assert gpt2.tokenize(text) == hugging_face.tokenize(text)
    assert gpt2.detokenize(gpt2.tokenize(text)) == text
    assert len(gpt2.tokenize(corpus_texts()[7])) < len(corpus_texts()[7])


@pytest.mark.parametrize("model_type", ["sentencepiece", "sentencepiece-unigram"])
def test_a_sentencepiece_model_is_written_and_loses_nothing(tmp_path, model_type):
    train(tmp_path / "tok", "--vocab-size", "400", "--model-type", model_type)
    tokenizer = create_tokenizer(
        TokenizerSpec(
            tokenizer_type="GPTSentencePieceTokenizer",
            tokenizer_model=str(tmp_path / "tok" / "tokenizer.model"),
        )
    )
    assert tokenizer.vocab_size == 400
    text = "two  blanks,\na new line and \u4f60"
    assert tokenizer.detokenize(tokenizer.tokenize(text)) == text


@pytest.mark.parametrize("case", ["", "-cased"])
def test_word_pieces_are_those_of_the_tokenizer_that_reads_them(tmp_path, case):
    train(tmp_path / "tok", "--vocab-size", "400", "--model-type", f"wordpiece{case}")
    tokenizer = create_tokenizer(
        TokenizerSpec(
            tokenizer_type=f"BertWordPiece{'Case' if case else 'LowerCase'}",
            vocab_file=str(tmp_path / "tok" / "vocab.txt"),
        )
    )
    assert tokenizer.vocab_size == 402, "and [BOS] and [EOS]"
    assert [tokenizer.pad, tokenizer.cls, tokenizer.sep, tokenizer.mask] == [0, 2, 3, 4]
    text = " ".join(corpus_texts()[7].split())
    ids = tokenizer.tokenize(text)
    assert tokenizer.vocab["[UNK]"] not in ids
    assert len(ids) < len(text)
    whole = tokenizer.detokenize(ids).replace(" ", "")
    assert whole == (text if case else text.lower()).replace(" ", "")


def test_only_the_first_bytes_are_learned_from_when_asked(tmp_path):
    source = tmp_path / "in.jsonl"
    lines = ["q" * 50] * 200_000 + ["z" * 50] * 1000
    source.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    argv = ["--input", str(source), "--output-dir", str(tmp_path), "--vocab-size", "270"]
    train_tokenizer.main([*argv, "--max-bytes", "1000"])
    assert "zz" not in json.loads((tmp_path / "vocab.json").read_text())
    assert "qq" in json.loads((tmp_path / "vocab.json").read_text())


def test_sizes_that_cannot_be_are_said_with_the_flag(tmp_path):
    with pytest.raises(ConfigError, match="--vocab-size 100 must be larger than the 256 bytes"):
        train(tmp_path, "--vocab-size", "100")
    with pytest.raises(ConfigError, match="--vocab-size 900000: sentencepiece says"):
        train(tmp_path, "--vocab-size", "900000", "--model-type", "sentencepiece")


def test_a_bad_line_is_named(tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": "a"}\n{"text": \n')
    argv = ["--input", str(source), "--output-dir", str(tmp_path), "--vocab-size", "300"]
    with pytest.raises(DataError, match="in.jsonl, line 2: no JSON"):
        train_tokenizer.main(argv)
