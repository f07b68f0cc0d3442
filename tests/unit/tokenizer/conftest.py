"""A small byte-level BPE, learned once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tokenizer_files import write_bpe


@pytest.fixture(scope="session")
def bpe_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """vocab.json, merges.txt, tokenizer.json: 600 ids, <|endoftext|> is 0."""
    return write_bpe(tmp_path_factory.mktemp("bpe"))
