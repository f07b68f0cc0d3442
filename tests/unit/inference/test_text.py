"""Text of generated tokens: characters, stop strings, offsets."""

from __future__ import annotations

import pytest

from megatron.core.inference.paged_engine.request import RequestOutput, TokenOutput
from megatron.inference.text import Detokenizer, SampleText, StopFinder, TextRules
from megatron.training.tokenizer import TokenizerSpec, create_tokenizer
from tests.support.tokenizer_files import SPM_MODEL, corpus_texts, write_bpe

TEXTS = (
    "Hello \U0001f600 world",
    "a \U0001f469\u200d\U0001f469\u200d\U0001f467 family",
    "na\u00efve caf\u00e9 \u65e5\u672c\u8a9e",
    "  two  spaces\n\n",
    "x . y , z !",
)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    folder = str(write_bpe(tmp_path_factory.mktemp("bpe")))
    return [
        create_tokenizer(
            TokenizerSpec(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=folder)
        ),
        create_tokenizer(
            TokenizerSpec(
                tokenizer_type="GPTSentencePieceTokenizer", tokenizer_model=str(SPM_MODEL)
            )
        ),
        create_tokenizer(TokenizerSpec(tokenizer_type="NullTokenizer", vocab_size=100)),
    ]


def test_tokens_one_at_a_time_give_the_text_of_all(tokenizers):
    for tokenizer in tokenizers[:2]:
        for text in (*TEXTS, *corpus_texts()[:5]):
            ids = tokenizer.tokenize(text)
            detokenizer = Detokenizer(tokenizer.detokenize)
            parts = [detokenizer.add(token) for token in ids]
            assert "".join(parts) + detokenizer.end() == tokenizer.detokenize(ids)


def test_text_after_a_prompt_is_what_the_prompt_lacks(tokenizers):
    for tokenizer in tokenizers:
        ids = (
            [7, 8, 9, 11, 12]
            if tokenizer.vocab_size < 200
            else tokenizer.tokenize("One two \U0001f600!")
        )
        for split in range(len(ids)):
            begin = tokenizer.detokenize(ids[:split]).rstrip("\ufffd")
            detokenizer = Detokenizer(tokenizer.detokenize, ids[:split])
            text = detokenizer.add_all(ids[split:])
            assert begin + text == tokenizer.detokenize(ids)


def test_no_part_of_a_character_is_shown(tokenizers):
    tokenizer = tokenizers[0]
    ids = tokenizer.tokenize("\U0001f600\U0001f600")
    detokenizer = Detokenizer(tokenizer.detokenize)
    parts = [detokenizer.add(token) for token in ids]
    assert len(ids) == 8
    assert parts == ["", "", "", "\U0001f600", "", "", "", "\U0001f600"]


def test_bytes_that_are_no_character_do_not_wait_for_ever(tokenizers):
    tokenizer = tokenizers[0]
    first_byte = tokenizer.tokenize("\U0001f600")[0]
    detokenizer = Detokenizer(tokenizer.detokenize)
    text = "".join(detokenizer.add(first_byte) for _ in range(100))
    assert text.count("\ufffd") > 90
    assert len(detokenizer._ids) < 20


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_a_stop_string_is_found_across_parts(size):
    text = "one two ENd END three"
    stops = ["END", "four"]
    finder = StopFinder(stops)
    shown = ""
    found = None
    for at in range(0, len(text), size):
        part, found = finder.add(text[at : at + size])
        shown += part
        if found:
            break
    assert (shown, found) == ("one two ENd ", "END")


def test_text_that_may_begin_a_stop_string_is_kept_back():
    finder = StopFinder(["</end>"])
    assert finder.add("a <") == ("a ", None)
    assert finder.add("/en") == ("", None)
    assert finder.add("t>") == ("</ent>", None)
    assert finder.add("<") == ("", None)
    assert finder.end() == "<"


def test_the_first_of_several_stop_strings_ends_the_text():
    assert StopFinder(["d", "bc"]).add("abcd") == ("a", "bc")


def _run(text, rules, tokenizer, end=None):
    state = SampleText(tokenizer.detokenize, rules)
    ids = [*tokenizer.tokenize(text), *([end] if end is not None else [])]
    deltas = []
    for number, token in enumerate(ids):
        is_last = number == len(ids) - 1
        reason = None if not is_last else "length" if end is None else "stop"
        deltas.append(state.add(RequestOutput("a", (TokenOutput(token, -1.0),), (), reason)))
        if deltas[-1].finish_reason is not None:
            break
    return deltas, "".join(delta.text for delta in deltas)


def test_a_sample_ends_before_its_stop_string(tokenizers):
    deltas, text = _run("one two three four", TextRules(stops=("hree",)), tokenizers[0])
    assert text == "one two t"
    assert (deltas[-1].finish_reason, deltas[-1].stopped_by) == ("stop", "hree")
    tokens = [placed for delta in deltas for placed in delta.tokens]
    assert all(placed.offset < len(text) for placed in tokens)
    assert tokenizers[0].detokenize([t.output.token for t in tokens]).startswith(text)


def test_a_sample_can_keep_its_stop_string(tokenizers):
    _, text = _run("one\ntwo", TextRules(stops=("\n",), keeps_stop=True), tokenizers[0])
    assert text == "one\n"


def test_an_end_token_has_no_text(tokenizers):
    deltas, text = _run("one two", TextRules(end_tokens=frozenset({0})), tokenizers[0], end=0)
    assert text == "one two"
    assert (deltas[-1].finish_reason, deltas[-1].stopped_by) == ("stop", 0)


def test_offsets_are_the_positions_of_tokens_in_the_text(tokenizers):
    deltas, text = _run("one \U0001f600 two", TextRules(), tokenizers[0])
    placed = [token for delta in deltas for token in delta.tokens]
    ids = [token.output.token for token in placed]
    assert ids == tokenizers[0].tokenize("one \U0001f600 two")
    for token, offset in zip(ids, [token.offset for token in placed], strict=True):
        piece = tokenizers[0].detokenize([token])
        assert "\ufffd" in piece or text[offset:].startswith(piece)


def test_no_stop_string_is_found_before_the_minimum_of_tokens(tokenizers):
    count = len(tokenizers[0].tokenize("one one"))
    _, text = _run("one one one", TextRules(stops=("one",), min_tokens=count), tokenizers[0])
    assert text == "one one "
