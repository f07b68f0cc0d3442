"""Bytes of the tokens of a vocabulary."""

from __future__ import annotations

import pytest

from megatron.training.tokenizer import TokenizerSpec, create_tokenizer
from megatron.training.tokenizer.fast import token_bytes
from tests.support.tokenizer_files import SPM_MODEL, write_bpe

TEXT = 'na\u00efve \u65e5\u672c \U0001f600 {"a": 1}\n'


@pytest.mark.parametrize("kind", ["HuggingFaceTokenizer", "GPTSentencePieceTokenizer"])
def test_bytes_of_tokens_join_to_the_text(kind, tmp_path):
    path = SPM_MODEL if "Sentence" in kind else write_bpe(tmp_path)
    tokenizer = create_tokenizer(TokenizerSpec(tokenizer_type=kind, tokenizer_model=str(path)))
    found = token_bytes(tokenizer)
    assert found is not None
    assert found[tokenizer.eod] is None
    joined = b"".join(found[i] or b"?" for i in tokenizer.tokenize(TEXT)).decode()
    assert joined.strip() == TEXT.strip()


def test_a_tokenizer_of_numbers_has_no_bytes():
    tokenizer = create_tokenizer(TokenizerSpec(tokenizer_type="NullTokenizer", vocab_size=50))
    assert token_bytes(tokenizer) is None
