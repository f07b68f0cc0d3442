"""The fast libraries give the owner's ids, or are not used."""

from __future__ import annotations

import unicodedata

import numpy as np
import pytest
import tokenizers

from megatron.core.config.errors import ConfigError
from megatron.training.tokenizer import TokenBatch, TokenizerSpec, create_tokenizer, fast
from megatron.training.tokenizer.base import surround
from megatron.training.tokenizer.fast import GigatokenEncoder, byte_of_character
from tests.support.tokenizer_files import SPM_MODEL, corpus_texts


@pytest.fixture
def gpt2(bpe_dir):
    return create_tokenizer(
        TokenizerSpec(
            tokenizer_type="GPT2BPETokenizer",
            vocab_file=str(bpe_dir / "vocab.json"),
            merge_file=str(bpe_dir / "merges.txt"),
        )
    )


def checked(tokenizer, sample, backend):
    """The first candidate that gives the owner's ids."""
    encoders = fast.candidates(tokenizer, backend)
    return next(e for e in encoders if fast.difference(tokenizer, e, sample) is None)


def same(a: TokenBatch, b: TokenBatch) -> bool:
    return np.array_equal(a.ids, b.ids) and np.array_equal(a.lengths, b.lengths)


@pytest.mark.parametrize("backend", ["gigatoken", "owner"])
def test_each_library_gives_the_owners_ids(gpt2, backend):
    if backend != "owner":
        pytest.importorskip(backend)
    encoder = checked(gpt2, corpus_texts()[:20], backend)
    assert encoder.name == backend
    texts = [*corpus_texts(), *fast.probe_texts([]), "", "x" * 100_000]
    assert same(encoder.encode_batch(texts), gpt2.tokenize_batch(texts))


def test_special_tokens_and_ids_around_a_text_are_kept(bpe_dir, tmp_path):
    pytest.importorskip("gigatoken")
    rules = tokenizers.Tokenizer.from_file(str(bpe_dir / "tokenizer.json"))
    rules.add_special_tokens(["<s>", "</s>"])
    rules.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>",
        special_tokens=[("<s>", rules.token_to_id("<s>")), ("</s>", rules.token_to_id("</s>"))],
    )
    rules.save(str(tmp_path / "tokenizer.json"))
    owner = create_tokenizer(
        TokenizerSpec(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(tmp_path))
    )
    encoder = checked(owner, ["a sample"], "gigatoken")
    texts = ["one <|endoftext|> two</s>", "", "<s><s>", *corpus_texts()[:5]]
    assert same(encoder.encode_batch(texts), owner.tokenize_batch(texts))


def test_one_wrong_id_is_a_difference_that_names_the_text(gpt2):
    class Wrong:
        name = "wrong"
        added_tokens = ()

        def encode_batch(self, texts):
            batch = gpt2.tokenize_batch(texts)
            wrong = gpt2.tokenize("zebra")[-1]
            return TokenBatch(np.where(batch.ids == wrong, 1, batch.ids), batch.lengths)

    found = fast.difference(gpt2, Wrong(), ["a zebra"])
    assert found is not None
    assert found.startswith("wrong gives other ids than the tokenizer's own library, for ")


def test_without_gigatoken_the_owner_is_taken(gpt2, monkeypatch):
    monkeypatch.setattr(fast, "why_missing", lambda name: "gone")
    assert checked(gpt2, [], "auto").name == "owner"
    with pytest.raises(ConfigError, match="--tokenizer-backend gigatoken: gone"):
        checked(gpt2, [], "gigatoken")


def test_a_tokenizer_that_is_no_byte_level_bpe_stays_with_its_owner():
    tokenizer = create_tokenizer(
        TokenizerSpec(tokenizer_type="GPTSentencePieceTokenizer", tokenizer_model=str(SPM_MODEL))
    )
    assert checked(tokenizer, ["x"], "auto").name == "owner"
    with pytest.raises(ConfigError, match="GPTSentencePieceTokenizer has no byte-level BPE"):
        checked(tokenizer, ["x"], "gigatoken")


def test_gigatoken_forgets_its_words_when_they_take_too_much_memory(gpt2):
    pytest.importorskip("gigatoken")
    encoder = GigatokenEncoder(gpt2.bpe_rules(), memory_growth=-1)
    before = encoder._bpe
    texts = list(corpus_texts()[:50])
    assert same(encoder.encode_batch(texts), gpt2.tokenize_batch(texts))
    assert encoder._bpe is not before


def test_gigatoken_takes_short_texts_in_one_call(gpt2):
    pytest.importorskip("gigatoken")
    encoder = GigatokenEncoder(gpt2.bpe_rules())
    texts = ["a b", "", "hello there\n"] * 20
    assert same(encoder.encode_batch(texts), gpt2.tokenize_batch(texts))
    assert same(encoder.encode_batch([]), gpt2.tokenize_batch([]))


def test_rules_that_gigatoken_cannot_run_are_left_to_the_owner(bpe_dir, tmp_path):
    pytest.importorskip("gigatoken")
    rules = tokenizers.Tokenizer.from_file(str(bpe_dir / "tokenizer.json"))
    rules.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"\p{L}+|[^\p{L}]+"), "isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    rules.save(str(tmp_path / "tokenizer.json"))
    owner = create_tokenizer(
        TokenizerSpec(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(tmp_path))
    )
    assert checked(owner, corpus_texts()[:5], "auto").name == "owner"
    with pytest.raises(
        ConfigError, match="gigatoken cannot run these rules: .*; use auto or owner"
    ):
        checked(owner, [], "gigatoken")


def test_the_probe_has_every_category_of_characters():
    text = "".join(fast.probe_texts(["<tok>"]))
    wanted = {unicodedata.category(chr(c)) for c in range(0x20000) if not 0xD800 <= c < 0xE000}
    assert {unicodedata.category(c) for c in text} >= wanted - {"Co"}
    assert "a<tok>b" in text


def test_surround_puts_ids_around_every_text_also_an_empty_one():
    batch = TokenBatch(np.array([5, 6, 7], np.int32), np.array([2, 0, 1]))
    found = surround(batch, [1], [2, 3])
    assert found.ids.tolist() == [1, 5, 6, 2, 3, 1, 2, 3, 1, 7, 2, 3]
    assert found.lengths.tolist() == [5, 3, 4]


def test_the_byte_table_is_the_one_of_the_library():
    assert set(byte_of_character()) == set(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    cut = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for character, byte in byte_of_character().items():
        if byte < 128:
            assert cut.pre_tokenize_str(chr(byte))[0][0] == character
