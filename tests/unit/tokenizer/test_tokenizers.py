"""Every kind of tokenizer gives the ids of the library that owns it, and its special ids."""

from __future__ import annotations

import json
from argparse import Namespace

import pytest
import sentencepiece
import tokenizers

from megatron.core.config.errors import ConfigError
from megatron.training.config.tokenizer import TokenizerConfig
from megatron.training.tokenizer import (
    TOKENIZERS,
    MissingToken,
    TokenizerSpec,
    build_tokenizer,
    create_tokenizer,
    pad_vocab_size,
)
from megatron.training.tokenizer.tokenizer import (
    _BertWordPieceTokenizer,
    _GPT2BPETokenizer,
    _NullMultimodalTokenizer,
    _NullTokenizer,
    _vocab_size_with_padding,
)
from tests.support.tokenizer_files import DATA, SPM_MODEL, corpus_texts

TEXTS = ("Hello world, it's 12 o'clock.", "", " \n\n x", "caf\u00e9 \u4f60\u597d \U0001f600", "<s>")


def batched(tokenizer, texts):
    """The rows of one batch call."""
    ids, lengths = tokenizer.tokenize_batch(texts)
    rows, at = [], 0
    for length in lengths:
        rows.append(ids[at : at + length].tolist())
        at += length
    assert at == len(ids)
    return rows


@pytest.fixture
def wordpiece_file(tmp_path):
    words = "[PAD] [UNK] [CLS] [SEP] [MASK] hello world ##s caf ##e cafe , . ' it # 1".split()
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(words) + "\n")
    return str(path)


def all_specs(bpe_dir, wordpiece_file):
    model = str(SPM_MODEL)
    return [
        TokenizerSpec(
            tokenizer_type="GPT2BPETokenizer",
            vocab_file=str(bpe_dir / "vocab.json"),
            merge_file=str(bpe_dir / "merges.txt"),
        ),
        TokenizerSpec(tokenizer_type="BertWordPieceLowerCase", vocab_file=wordpiece_file),
        TokenizerSpec(tokenizer_type="BertWordPieceCase", vocab_file=wordpiece_file),
        TokenizerSpec(tokenizer_type="SentencePieceTokenizer", tokenizer_model=model),
        TokenizerSpec(tokenizer_type="GPTSentencePieceTokenizer", tokenizer_model=model),
        TokenizerSpec(tokenizer_type="Llama2Tokenizer", tokenizer_model=model),
        TokenizerSpec(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(bpe_dir)),
    ]


def test_a_batch_gives_the_ids_of_its_texts_one_by_one(bpe_dir, wordpiece_file):
    for spec in all_specs(bpe_dir, wordpiece_file):
        tokenizer = create_tokenizer(spec)
        texts = [*TEXTS, *corpus_texts()[:3]]
        assert batched(tokenizer, texts) == [list(tokenizer.tokenize(text)) for text in texts]
        assert batched(tokenizer, []) == []


def test_the_vocabulary_and_its_inverse_agree_with_its_size(bpe_dir, wordpiece_file):
    for spec in all_specs(bpe_dir, wordpiece_file):
        tokenizer = create_tokenizer(spec)
        assert len(tokenizer.vocab) == tokenizer.vocab_size
        assert {i: t for t, i in tokenizer.vocab.items()} == dict(tokenizer.inv_vocab)


def test_gpt2_gives_the_ids_of_the_tokenizers_library(bpe_dir):
    tokenizer = _GPT2BPETokenizer(str(bpe_dir / "vocab.json"), str(bpe_dir / "merges.txt"))
    owner = tokenizers.Tokenizer.from_file(str(bpe_dir / "tokenizer.json"))
    for text in (*TEXTS, *corpus_texts()[:5]):
        assert tokenizer.tokenize(text) == owner.encode(text).ids
        assert tokenizer.detokenize(tokenizer.tokenize(text)) == text
    assert tokenizer.eod == owner.token_to_id("<|endoftext|>")


def test_gpt2_reads_a_special_token_in_a_text_as_text(bpe_dir):
    tokenizer = _GPT2BPETokenizer(str(bpe_dir / "vocab.json"), str(bpe_dir / "merges.txt"))
    assert tokenizer.eod not in tokenizer.tokenize("a<|endoftext|>b")


def test_gpt2_without_its_end_of_text_says_which_token_is_missing(bpe_dir, tmp_path):
    vocab = json.loads((bpe_dir / "vocab.json").read_text())
    vocab["<other>"] = vocab.pop("<|endoftext|>")
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    tokenizer = _GPT2BPETokenizer(str(tmp_path / "vocab.json"), str(bpe_dir / "merges.txt"))
    with pytest.raises(MissingToken, match="no '<|endoftext|>', which is its EOD token"):
        _ = tokenizer.eod
    assert not hasattr(tokenizer, "eod")


def test_wordpiece_cuts_words_and_keeps_or_drops_case_and_accents(wordpiece_file):
    lower = _BertWordPieceTokenizer(wordpiece_file, lower_case=True)
    assert [lower.inv_vocab[i] for i in lower.tokenize("Hello, WORLDs Caf\u00e9 zebra")] == [
        *("hello", ",", "world", "##s", "cafe", "[UNK]"),
    ]
    case = _BertWordPieceTokenizer(wordpiece_file, lower_case=False)
    assert [case.inv_vocab[i] for i in case.tokenize("Hello worlds")] == ["[UNK]", "world", "##s"]
    assert lower.detokenize([lower.cls, *lower.tokenize("hello worlds"), lower.pad]) == (
        "hello worlds"
    )


def test_wordpiece_appends_its_added_tokens_after_the_vocabulary(wordpiece_file):
    tokenizer = _BertWordPieceTokenizer(wordpiece_file, vocab_extra_ids=2)
    assert (tokenizer.bos, tokenizer.eos) == (17, 18)
    assert tokenizer.additional_special_tokens_ids == [19, 20]
    assert (tokenizer.pad, tokenizer.cls, tokenizer.sep, tokenizer.mask) == (0, 2, 3, 4)
    assert tokenizer.vocab_size == 21
    assert tokenizer.eod == tokenizer.eos


def test_sentencepiece_for_gpt_is_the_model_file_alone():
    owner = sentencepiece.SentencePieceProcessor(model_file=str(SPM_MODEL))
    tokenizer = create_tokenizer(
        TokenizerSpec(tokenizer_type="GPTSentencePieceTokenizer", tokenizer_model=str(SPM_MODEL))
    )
    for text in TEXTS:
        assert tokenizer.tokenize(text) == owner.encode(text)
    assert tokenizer.vocab_size == owner.get_piece_size()
    assert (tokenizer.eod, tokenizer.bos) == (owner.eos_id(), owner.bos_id())
    with pytest.raises(MissingToken, match="no PAD token"):
        _ = tokenizer.pad


def test_sentencepiece_gives_special_words_in_a_text_their_ids():
    tokenizer = create_tokenizer(
        TokenizerSpec(
            tokenizer_type="SentencePieceTokenizer",
            tokenizer_model=str(SPM_MODEL),
            vocab_extra_ids=3,
        )
    )
    assert [tokenizer.cls, tokenizer.sep, tokenizer.eod, tokenizer.mask] == [512, 513, 514, 515]
    assert (tokenizer.bos, tokenizer.eos, tokenizer.pad) == (1, 2, 516)
    assert tokenizer.additional_special_tokens_ids == [517, 518, 519]
    ids = tokenizer.tokenize("one<EOD>two <extra_id_2>")
    assert ids.count(514) == 1
    assert ids[-1] == 519
    assert tokenizer.detokenize(ids) == "one <EOD> two <extra_id_2>"
    assert batched(tokenizer, ["x", "one<EOD>two <extra_id_2>", ""])[1] == ids


def test_llama2_begins_a_text_with_bos():
    tokenizer = create_tokenizer(
        TokenizerSpec(tokenizer_type="Llama2Tokenizer", tokenizer_model=str(SPM_MODEL))
    )
    plain = tokenizer.tokenize("hello", bos=False)
    assert tokenizer.tokenize("hello") == [1, *plain]
    assert tokenizer.tokenize_plain("hello") == plain
    assert tokenizer.tokenize("hello", eos=True) == [1, *plain, 2]
    assert batched(tokenizer, ["hello", ""]) == [[1, *plain], [1]]
    assert tokenizer.eod == 2


def test_null_reads_and_writes_ids_in_decimal():
    tokenizer = _NullTokenizer(100)
    assert tokenizer.tokenize("3 1 4") == [3, 1, 4]
    assert tokenizer.detokenize([3, 1, 4]) == "3 1 4"
    assert tokenizer.offsets([3, 15, 4], "3 15 4") == [0, 2, 5]
    assert (tokenizer.vocab_size, tokenizer.eod) == (101, 100)
    with pytest.raises(ConfigError, match="reads ids in decimal"):
        tokenizer.tokenize("three")


def test_null_multimodal_has_a_word_for_an_image():
    tokenizer = _NullMultimodalTokenizer(100)
    assert tokenizer.convert_tokens_to_ids("<image>") == -200
    assert tokenizer.convert_tokens_to_ids(["7", "<image>"]) == [7, -200]
    assert tokenizer.convert_tokens_to_ids("7") == 7


@pytest.mark.parametrize("kind", ["GPT2BPETokenizer", "GPTSentencePieceTokenizer"])
def test_offsets_are_the_characters_where_tokens_start(kind, bpe_dir, wordpiece_file):
    spec = next(s for s in all_specs(bpe_dir, wordpiece_file) if s.tokenizer_type == kind)
    tokenizer = create_tokenizer(spec)
    ids = tokenizer.tokenize("abc def")
    offsets = tokenizer.offsets(ids, "abc def")
    assert len(offsets) == len(ids)
    assert offsets == sorted(offsets)
    with pytest.raises(MissingToken, match="offsets are known"):
        tokenizer.offsets(ids[:-1], "abc def")


def test_the_identity_is_what_the_reference_wrote_into_its_index_cache():
    description = json.loads(
        next((DATA / "index_cache").glob("*train-description.txt")).read_text()
    )
    spec = TokenizerSpec(tokenizer_type="GPTSentencePieceTokenizer", tokenizer_model=str(SPM_MODEL))
    found = create_tokenizer(spec).unique_identifiers
    assert list(found) == list(description["tokenizer"])
    assert {**found, "tokenizer_path": ["spm.model"]} == description["tokenizer"]


def test_every_name_of_the_flag_has_a_tokenizer():
    choices = next(
        flag["choices"]
        for flag in json.loads((DATA.parent / "flags.json").read_text())
        if "--tokenizer-type" in flag["flags"]
    )
    assert set(TOKENIZERS) == set(choices)


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        (TokenizerSpec(), "--tokenizer-type is missing"),
        (TokenizerSpec(tokenizer_type="Other"), "--tokenizer-type Other is unknown"),
        (TokenizerSpec(tokenizer_type="NullTokenizer"), "NullTokenizer needs --vocab-size"),
        (
            TokenizerSpec(tokenizer_type="BertWordPieceCase", vocab_file="/none"),
            "--vocab-file /none: .*No such file",
        ),
        (
            TokenizerSpec(
                tokenizer_type="GPT2BPETokenizer", vocab_file="/none", merge_file="/none"
            ),
            "--vocab-file /none --merge-file /none: ",
        ),
        (
            TokenizerSpec(tokenizer_type="Llama2Tokenizer", tokenizer_model="/none"),
            "--tokenizer-model /none: .*it must be a SentencePiece model",
        ),
    ],
)
def test_what_cannot_be_built_is_said_with_flag_and_cure(spec, sentence):
    with pytest.raises(ConfigError, match=sentence):
        create_tokenizer(spec)


def test_a_vocabulary_without_unk_is_no_wordpiece(tmp_path):
    path = tmp_path / "vocab.txt"
    path.write_text("a\nb\n")
    with pytest.raises(ConfigError, match=r"has no line \[UNK\]"):
        _BertWordPieceTokenizer(str(path))


def test_a_vocabulary_with_a_token_twice_is_refused_with_both_lines(tmp_path):
    path = tmp_path / "vocab.txt"
    path.write_text("[PAD]\n[UNK]\nword\nother\nword \n")
    with pytest.raises(ConfigError, match=r"line 5 repeats 'word' of line 3.*\[unused0\]"):
        _BertWordPieceTokenizer(str(path))


def test_padding_rounds_up_to_a_multiple_per_rank():
    assert pad_vocab_size(50257, 128, 1) == 50304
    assert pad_vocab_size(50257, 128, 8) == 51200
    assert pad_vocab_size(512, 128, 4) == 512
    assert pad_vocab_size(1, 128, 1) == 128


def test_the_facade_sets_the_padded_size_and_speaks_on_rank_0(capsys):
    args = Namespace(
        tokenizer_type="NullTokenizer",
        vocab_size=1000,
        make_vocab_size_divisible_by=128,
        tensor_model_parallel_size=2,
        padded_vocab_size=None,
        rank=0,
    )
    tokenizer = build_tokenizer(args)
    assert tokenizer.vocab_size == 1001
    assert args.padded_vocab_size == 1024
    assert capsys.readouterr().out.splitlines() == [
        "> building NullTokenizer tokenizer ...",
        " > padded vocab (size: 1001) with 23 dummy tokens (new size: 1024)",
    ]
    args.rank = 1
    assert _vocab_size_with_padding(1001, args) == 1024
    assert capsys.readouterr().out == ""


def test_a_given_padded_size_is_kept():
    args = Namespace(tokenizer_type="NullTokenizer", vocab_size=10, padded_vocab_size=99, rank=1)
    build_tokenizer(args)
    assert args.padded_vocab_size == 99


def test_a_spec_is_picked_out_of_the_frozen_config():
    options = {"tokenizer_type": "NullTokenizer", "vocab_size": 7, "padded_vocab_size": 8}
    assert TokenizerSpec.of(TokenizerConfig(**options)) == TokenizerSpec(**options)
